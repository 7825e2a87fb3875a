//! `schemas/` is what the program prints, every shipped file names its schema and fits it, and files that are wrong do not.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tpusim::config::Document;
use tpusim::schema::Kind;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The YAML files of a folder, in order.
fn files(folder: &str) -> Result<Vec<String>, std::io::Error> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root().join(folder))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if Path::new(&name)
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            names.push(format!("{folder}/{name}"));
        }
    }
    names.sort();
    Ok(names)
}

/// `SNAPSHOTS=overwrite` writes them anew.
#[test]
fn the_files_are_what_the_program_prints() -> Outcome {
    let overwrite = std::env::var_os("SNAPSHOTS").is_some_and(|action| action == "overwrite");
    for kind in Kind::ALL {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tpusim"))
            .args(["schema", kind.name()])
            .output()?;
        assert!(output.status.success());
        let path = root().join("schemas").join(kind.file_name());
        // Byte by byte: snapshots take the backslashes of a pattern for those of a path.
        if fs::read(&path).is_ok_and(|file| file == output.stdout) {
            continue;
        }
        assert!(
            overwrite,
            "{0} is not what is printed: `tpusim schema {kind} > schemas/{0}`",
            kind.file_name()
        );
        fs::write(&path, output.stdout)?;
    }
    Ok(())
}

#[test]
fn schemas_are_schemas() -> Outcome {
    for kind in Kind::ALL {
        let schema = kind.schema();
        jsonschema::meta::validate(&schema).map_err(|error| error.to_string())?;
        // An editor shows what a field is.
        let properties = schema["properties"].as_object().ok_or("properties")?;
        for (name, property) in properties {
            assert!(
                property.get("description").is_some(),
                "{kind}: {name} has no description"
            );
        }
    }
    Ok(())
}

#[test]
fn every_shipped_file_names_its_schema_and_fits_it() -> Outcome {
    let mut checked = 0;
    for file in [
        files("workloads")?,
        files("workloads/studies")?,
        files("models")?,
        files("hw")?,
    ]
    .concat()
    {
        let path = root().join(&file);
        let document = Document::read(&path)?;
        let kind = match (file.split('/').nth_back(1), document.node("stack")) {
            (Some("hw"), _) => Kind::Hardware,
            (Some("studies"), _) => Kind::Study,
            (Some("models"), _) => Kind::Model,
            (_, Some(_)) => Kind::Stack,
            (_, None) => Kind::Workload,
        };
        let first = document.text().lines().next().unwrap_or_default();
        let named = first
            .strip_prefix("# yaml-language-server: $schema=")
            .ok_or_else(|| format!("{file} names no schema"))?;
        let target = path.parent().ok_or("folder")?.join(named).canonicalize()?;
        assert_eq!(
            target,
            root().join("schemas").join(kind.file_name()).canonicalize()?,
            "{file}"
        );
        let schema: Value = serde_json::from_str(&fs::read_to_string(target)?)?;
        let validator = jsonschema::validator_for(&schema)?;
        let faults: Vec<String> = validator
            .iter_errors(&Value::from(&document.root().value))
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert!(faults.is_empty(), "{file}: {}", faults.join("; "));
        checked += 1;
    }
    assert!(checked >= 70, "only {checked}");
    Ok(())
}

/// What messages say where the structure of a file is at fault, not a relation between its values.
const STRUCTURE: [&str; 9] = [
    "unknown key",
    "unknown name",
    "unknown mechanism",
    "unknown field",
    "is not a unit of",
    "bare number",
    "expected a map",
    "expected text",
    "does not read",
];

#[test]
fn files_of_the_wrong_structure_do_not_fit() -> Outcome {
    let (mut read, mut refused, mut structural) = (0, 0, 0);
    let mut complaints = Vec::new();
    for file in files("tests/errors")? {
        let path = root().join(&file);
        let Ok(document) = Document::read(&path) else {
            continue;
        };
        let message = fs::read_to_string(path.with_extension("stderr"))?;
        let kind = if document.node("stack").is_some() {
            Kind::Stack
        } else if document.node("workload").is_some() {
            Kind::Study
        } else if file.contains("/hw_") {
            Kind::Hardware
        } else {
            Kind::Workload
        };
        let fits = jsonschema::is_valid(&kind.schema(), &Value::from(&document.root().value));
        read += 1;
        refused += usize::from(!fits);
        // The fault of an override or of another file is none of this file.
        let own = message.contains(file.trim_start_matches("tests/errors/"));
        if own && STRUCTURE.iter().any(|words| message.contains(words)) {
            structural += 1;
            if fits {
                complaints.push(format!("{file} fits its schema: {message}"));
            }
        }
    }
    assert!(structural >= 20 && read > 80, "{structural} of {read}");
    assert!(2 * refused > read, "{refused} of {read}");
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    Ok(())
}
