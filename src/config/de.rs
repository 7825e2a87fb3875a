//! A serde deserializer over the tree, whose errors name the field and point at its key or value.

use std::fmt;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};

use super::error::Location;
use super::nearest::{listed, suggestion};
use super::tree::{Key, Node, Value, shorten};

/// Reads `T` from a tree.
///
/// # Errors
/// The location and the whole message, the dotted path of the field in front.
pub(super) fn read<'de, T: Deserialize<'de>>(root: &'de Node) -> Result<T, (Location, String)> {
    let reader = Reader {
        node: root,
        owner: &root.location,
        path: &Path::Root,
    };
    T::deserialize(reader).map_err(|error| {
        let (location, path) = error
            .spot
            .unwrap_or_else(|| (root.location.clone(), String::new()));
        let message = if path.is_empty() {
            error.message
        } else {
            format!("{path}: {}", error.message)
        };
        (location, message)
    })
}

#[derive(Debug)]
struct Error {
    message: String,
    /// A missing key belongs to the map, not to the value that happens to be read.
    about_map: bool,
    spot: Option<(Location, String)>,
}

impl Error {
    fn new(message: String) -> Self {
        Self {
            message,
            about_map: false,
            spot: None,
        }
    }

    /// Adds the spot, unless one nearer to the fault is known.
    fn at(mut self, location: &Location, path: &Path<'_>) -> Self {
        if self.spot.is_none() {
            self.spot = Some((location.clone(), path.to_string()));
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// serde's words for what a type expects, in the words of people.
fn expectation(expected: &dyn Expected) -> String {
    let words = expected.to_string();
    match words.as_str() {
        "u8" => "a whole number from 0 to 255".to_owned(),
        "u16" => "a whole number from 0 to 65535".to_owned(),
        "u32" => "a whole number from 0 to 4294967295".to_owned(),
        "u64" | "u128" | "usize" => "a whole number of zero or more".to_owned(),
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a string" => "text".to_owned(),
        "a boolean" => "`true` or `false`".to_owned(),
        "a sequence" => "a list".to_owned(),
        other if other.starts_with("struct ") => "a map of keys and values".to_owned(),
        other if other.starts_with("enum ") || other == "variant identifier" => "a name".to_owned(),
        other if other.starts_with("tuple of ") => other.replace("tuple of", "a list of"),
        _ => words,
    }
}

fn finding(unexpected: Unexpected<'_>) -> String {
    match unexpected {
        Unexpected::Bool(value) => format!("`{value}`"),
        Unexpected::Unsigned(value) => format!("the number `{value}`"),
        Unexpected::Signed(value) => format!("the number `{value}`"),
        Unexpected::Float(value) => format!("the number `{value:?}`"),
        Unexpected::Char(value) => format!("the text `{value}`"),
        Unexpected::Str(value) => format!("the text `{}`", shorten(value)),
        Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a map".to_owned(),
        other => other.to_string(),
    }
}

impl de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(unexpected: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let number = matches!(
            unexpected,
            Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_)
        );
        let expected = expectation(expected);
        let remedy = if expected == "text" && (number || matches!(unexpected, Unexpected::Bool(_))) {
            "; put it in quotes"
        } else {
            ""
        };
        Self::new(format!(
            "expected {expected}, found {}{remedy}",
            finding(unexpected)
        ))
    }

    fn invalid_value(unexpected: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(format!(
            "expected {}, found {}",
            expectation(expected),
            finding(unexpected)
        ))
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::new(format!(
            "expected {}, found {length} of them",
            expectation(expected)
        ))
    }

    fn unknown_variant(name: &str, valid: &'static [&'static str]) -> Self {
        Self::new(format!(
            "unknown name `{}`; {}",
            shorten(name),
            suggestion(name, valid, "valid names")
        ))
    }

    fn unknown_field(name: &str, valid: &'static [&'static str]) -> Self {
        if valid.is_empty() {
            return Self::new(format!(
                "unknown key `{}`; no keys are expected here",
                shorten(name)
            ));
        }
        Self::new(format!(
            "unknown key `{}`; {}",
            shorten(name),
            suggestion(name, valid, "valid keys")
        ))
    }

    fn missing_field(name: &'static str) -> Self {
        Self {
            message: format!("missing key `{name}`"),
            about_map: true,
            spot: None,
        }
    }

    fn duplicate_field(name: &'static str) -> Self {
        Self::new(format!("duplicate key `{name}`; keep one of them"))
    }
}

/// The way from the root to a node, written out only where something is wrong there.
enum Path<'p> {
    Root,
    Key(&'p Path<'p>, &'p str),
    Index(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    /// A dotted path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parent = match self {
            Path::Root => return Ok(()),
            Path::Key(parent, _) | Path::Index(parent, _) => parent,
        };
        if !matches!(parent, Path::Root) {
            write!(f, "{parent}.")?;
        }
        match self {
            Path::Root => Ok(()),
            Path::Key(_, name) => f.write_str(name),
            Path::Index(_, index) => write!(f, "{index}"),
        }
    }
}

/// Deserializer of one node.
struct Reader<'de, 'p> {
    node: &'de Node,
    /// The key that holds the node; the node itself at the root and in lists.
    owner: &'de Location,
    path: &'p Path<'p>,
}

impl<'de> Reader<'de, '_> {
    fn wrap<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        result.map_err(|error| {
            let location = if error.about_map {
                self.owner
            } else {
                &self.node.location
            };
            error.at(location, self.path)
        })
    }

    fn fail<T>(&self, message: String) -> Result<T, Error> {
        self.wrap(Err(Error::new(message)))
    }

    fn visit_map<V: Visitor<'de>>(&self, entries: &'de [(Key, Node)], visitor: V) -> Result<V::Value, Error> {
        self.wrap(visitor.visit_map(Entries {
            rest: entries.iter(),
            value: None,
            path: self.path,
        }))
    }
}

impl<'de> Deserializer<'de> for Reader<'de, '_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match &self.node.value {
            Value::Null => self.wrap(visitor.visit_unit()),
            Value::Bool(value) => self.wrap(visitor.visit_bool(*value)),
            Value::Int(value) => self.wrap(visitor.visit_i64(*value)),
            Value::Float(value) => self.wrap(visitor.visit_f64(*value)),
            Value::String(value) => self.wrap(visitor.visit_borrowed_str(value)),
            Value::Seq(items) => self.wrap(visitor.visit_seq(Items {
                items: items.iter().enumerate(),
                path: self.path,
            })),
            Value::Map(entries) => self.visit_map(entries, visitor),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.node.value {
            Value::Float(value) if !value.is_finite() => {
                self.fail(format!("expected a finite number, found `{value}`"))
            }
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match &self.node.value {
            Value::Map(entries) => self.visit_map(entries, visitor),
            // serde would read a list field by field, which nobody could read back.
            other => self.fail(format!(
                "expected a map with the keys {}, found {}",
                listed(fields.iter().copied()),
                other.describe()
            )),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let (name, location, content) = match &self.node.value {
            Value::String(name) => (name, &self.node.location, None),
            Value::Map(entries) => {
                let [(key, content)] = entries.as_slice() else {
                    let count = entries.len();
                    return self.fail(format!(
                        "expected a map with one key of {}, found {count} keys",
                        listed(variants.iter().copied())
                    ));
                };
                (&key.name, &key.location, Some(content))
            }
            other => {
                return self.fail(format!(
                    "expected one of {}, found {}",
                    listed(variants.iter().copied()),
                    other.describe()
                ));
            }
        };
        self.wrap(visitor.visit_enum(Choice {
            name,
            location,
            content,
            path: self.path,
        }))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier
    }
}

struct Items<'de, 'p> {
    items: std::iter::Enumerate<std::slice::Iter<'de, Node>>,
    path: &'p Path<'p>,
}

impl<'de> SeqAccess<'de> for Items<'de, '_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let Some((index, node)) = self.items.next() else {
            return Ok(None);
        };
        seed.deserialize(Reader {
            node,
            owner: &node.location,
            path: &Path::Index(self.path, index),
        })
        .map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len())
    }
}

struct Entries<'de, 'p> {
    rest: std::slice::Iter<'de, (Key, Node)>,
    value: Option<(&'de Key, &'de Node)>,
    path: &'p Path<'p>,
}

impl<'de> MapAccess<'de> for Entries<'de, '_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some((key, node)) = self.rest.next() else {
            return Ok(None);
        };
        self.value = Some((key, node));
        seed.deserialize(KeyReader { key, path: self.path }).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let Some((key, node)) = self.value.take() else {
            return Err(Error::new("value asked for before its key".to_owned()));
        };
        seed.deserialize(Reader {
            node,
            owner: &key.location,
            path: &Path::Key(self.path, &key.name),
        })
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// Deserializer of a key, which is always text; whole numbers are read where the type asks for them.
struct KeyReader<'de, 'p> {
    key: &'de Key,
    path: &'p Path<'p>,
}

impl<'de> KeyReader<'de, '_> {
    fn visit_number<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.key.name.parse::<i64>() {
            Ok(number) => visitor.visit_i64(number),
            Err(_) => visitor.visit_borrowed_str(&self.key.name),
        }
        .map_err(|error: Error| error.at(&self.key.location, self.path))
    }
}

macro_rules! numeric_keys {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.visit_number(visitor)
        })*
    };
}

impl<'de> Deserializer<'de> for KeyReader<'de, '_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor
            .visit_borrowed_str(&self.key.name)
            .map_err(|error: Error| error.at(&self.key.location, self.path))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let choice = Choice {
            name: &self.key.name,
            location: &self.key.location,
            content: None,
            path: self.path,
        };
        visitor
            .visit_enum(choice)
            .map_err(|error: Error| error.at(&self.key.location, self.path))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    numeric_keys! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
    }

    serde::forward_to_deserialize_any! {
        bool i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        struct identifier ignored_any
    }
}

/// A variant's name, with its content where it was written as a map of one key.
struct Choice<'de, 'p> {
    name: &'de str,
    location: &'de Location,
    content: Option<&'de Node>,
    path: &'p Path<'p>,
}

impl<'de, 'p> EnumAccess<'de> for Choice<'de, 'p> {
    type Error = Error;
    type Variant = Content<'de, 'p>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Content<'de, 'p>), Error> {
        let name: de::value::BorrowedStrDeserializer<'de, Error> =
            de::value::BorrowedStrDeserializer::new(self.name);
        let variant = seed
            .deserialize(name.into_deserializer())
            .map_err(|error: Error| error.at(self.location, self.path))?;
        Ok((variant, Content { choice: self }))
    }
}

struct Content<'de, 'p> {
    choice: Choice<'de, 'p>,
}

impl<'de> Content<'de, '_> {
    /// Reads what stands under the name.
    fn read<T>(self, read: impl FnOnce(Reader<'de, '_>) -> Result<T, Error>) -> Result<T, Error> {
        let Choice {
            name,
            location,
            content,
            path,
        } = self.choice;
        match content {
            Some(node) => read(Reader {
                node,
                owner: location,
                path: &Path::Key(path, name),
            }),
            None => Err(
                Error::new(format!("`{name}` needs its fields; write `{name}: {{ ... }}`"))
                    .at(location, path),
            ),
        }
    }
}

impl<'de> VariantAccess<'de> for Content<'de, '_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        match self.choice.content {
            None
            | Some(Node {
                value: Value::Null, ..
            }) => Ok(()),
            Some(node) => {
                let message = format!(
                    "`{}` takes no fields, found {}",
                    self.choice.name,
                    node.value.describe()
                );
                Err(Error::new(message).at(&node.location, self.choice.path))
            }
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        self.read(|reader| seed.deserialize(reader))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.read(|reader| reader.deserialize_any(visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.read(|reader| reader.deserialize_struct("", fields, visitor))
    }
}
