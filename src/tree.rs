//! Trees of speculated tokens: which token follows which, and which of them were accepted.

use serde::Serialize;

/// Most tokens of a tree: beyond any published one, and small enough to be one chunk.
pub const MOST_NODES: usize = 1024;

/// A tree of tokens after the last one of a sequence, parents before their children.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tree {
    /// Parent of every token; none where it follows the sequence itself.
    parents: Vec<Option<usize>>,
    /// Last token of the accepted path, up to which the state is committed.
    accepted: usize,
}

/// Why some parents are no tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// No token.
    #[error("expected at least one token, found none")]
    Empty,
    /// Too many tokens.
    #[error("expected at most {MOST_NODES} tokens, found `{0}`")]
    TooLarge(usize),
    /// A token whose parent does not stand before it.
    #[error("parent of token {node}: expected -1 or a token before it, found `{parent}`")]
    Parent {
        /// Token, from 0.
        node: usize,
        /// What stands for its parent.
        parent: i64,
    },
    /// An accepted token outside the tree.
    #[error("expected one of the {nodes} tokens, counted from 0, found `{found}`")]
    Accepted {
        /// Tokens of the tree.
        nodes: usize,
        /// What was asked for.
        found: usize,
    },
}

impl Tree {
    /// One token of which every token has `branching` children until `depth` tokens stand on every path.
    ///
    /// # Errors
    /// [`TreeError::Empty`] where either is 0, [`TreeError::TooLarge`].
    pub fn regular(branching: usize, depth: usize) -> Result<Self, TreeError> {
        if branching == 0 || depth == 0 {
            return Err(TreeError::Empty);
        }
        let (mut nodes, mut level) = (1_usize, 1_usize);
        for _ in 1..depth {
            level = level.saturating_mul(branching);
            nodes = nodes.saturating_add(level);
            if nodes > MOST_NODES {
                return Err(TreeError::TooLarge(nodes));
            }
        }
        // Level by level: the children of a token lie together.
        Self::of_parents(
            (0..nodes)
                .map(|node| node.checked_sub(1).map(|earlier| earlier / branching))
                .collect(),
        )
    }

    /// A tree by the parent of every token, -1 for those that follow the sequence.
    ///
    /// # Errors
    /// Where a parent does not stand before its child, or there are no tokens or too many.
    pub fn of_list(parents: &[i64]) -> Result<Self, TreeError> {
        let checked = parents.iter().enumerate().map(|(node, &parent)| {
            let before = usize::try_from(parent).ok().filter(|&parent| parent < node);
            match (parent, before) {
                (-1, _) => Ok(None),
                (_, Some(parent)) => Ok(Some(parent)),
                (parent, None) => Err(TreeError::Parent { node, parent }),
            }
        });
        Self::of_parents(checked.collect::<Result<_, _>>()?)
    }

    fn of_parents(parents: Vec<Option<usize>>) -> Result<Self, TreeError> {
        match parents.len() {
            0 => return Err(TreeError::Empty),
            nodes if nodes > MOST_NODES => return Err(TreeError::TooLarge(nodes)),
            _ => {}
        }
        let mut tree = Tree { parents, accepted: 0 };
        // Of the longest paths the first.
        tree.accepted = (0..tree.nodes())
            .rev()
            .max_by_key(|&node| tree.path(node).len())
            .unwrap_or(0);
        Ok(tree)
    }

    /// The same tree of which another path was accepted, up to token `node`.
    ///
    /// # Errors
    /// [`TreeError::Accepted`].
    pub fn accepting(self, node: usize) -> Result<Self, TreeError> {
        let nodes = self.nodes();
        if node >= nodes {
            return Err(TreeError::Accepted { nodes, found: node });
        }
        Ok(Tree {
            accepted: node,
            ..self
        })
    }

    /// Tokens.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.parents.len()
    }

    /// Tokens of the longest path.
    #[must_use]
    pub fn depth(&self) -> usize {
        (0..self.nodes())
            .map(|node| self.path(node).len())
            .max()
            .unwrap_or(0)
    }

    /// Last token of the accepted path.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// The tokens from the first one after the sequence to `node`.
    #[must_use]
    pub fn path(&self, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        let mut at = node;
        while let Some(parent) = self.parents.get(at).copied().flatten() {
            path.push(parent);
            at = parent;
        }
        path.reverse();
        path
    }

    /// The token `steps` before `node` on its path; where the path is shorter, how many tokens before the tree it lies: 1 for the last of the sequence.
    ///
    /// # Errors
    /// That number of tokens, where it lies before the tree.
    pub fn before(&self, node: usize, steps: usize) -> Result<usize, usize> {
        let path = self.path(node);
        let last = path.len() - 1;
        match last.checked_sub(steps) {
            Some(at) => Ok(path[at]),
            None => Err(steps - last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_tree_has_the_nodes_of_its_levels() -> Result<(), TreeError> {
        for (branching, depth, nodes) in [(1, 5, 5), (2, 4, 15), (3, 3, 13), (4, 1, 1)] {
            let tree = Tree::regular(branching, depth)?;
            assert_eq!((tree.nodes(), tree.depth()), (nodes, depth));
            assert_eq!(tree.path(tree.accepted()).len(), depth);
        }
        assert_eq!(Tree::regular(2, 3)?, Tree::of_list(&[-1, 0, 0, 1, 1, 2, 2])?);
        assert_eq!(Tree::regular(0, 3), Err(TreeError::Empty));
        assert!(matches!(Tree::regular(32, 4), Err(TreeError::TooLarge(_))));
        assert!(matches!(
            Tree::regular(usize::MAX, 9),
            Err(TreeError::TooLarge(_))
        ));
        Ok(())
    }

    #[test]
    fn paths_lead_from_the_sequence_to_the_node() -> Result<(), TreeError> {
        let tree = Tree::of_list(&[-1, 0, -1, 1, 2, 3])?;
        assert_eq!(tree.path(5), [0, 1, 3, 5]);
        assert_eq!(tree.accepted(), 5);
        assert_eq!(tree.before(5, 2), Ok(1));
        assert_eq!(tree.before(5, 4), Err(1));
        assert_eq!(tree.before(2, 3), Err(3));
        assert_eq!(tree.clone().accepting(4)?.path(4), [2, 4]);
        assert_eq!(tree.accepting(6), Err(TreeError::Accepted { nodes: 6, found: 6 }));
        Ok(())
    }

    #[test]
    fn a_parent_stands_before_its_child() {
        assert_eq!(Tree::of_list(&[]), Err(TreeError::Empty));
        assert_eq!(
            Tree::of_list(&[-1, 1]),
            Err(TreeError::Parent { node: 1, parent: 1 })
        );
        assert_eq!(
            Tree::of_list(&[-2]),
            Err(TreeError::Parent { node: 0, parent: -2 })
        );
    }
}
