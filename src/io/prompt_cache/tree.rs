//! Flattened tree paths (`3.0.1`), as `mlx.utils.tree_flatten` writes them, back into a tree.

use std::collections::BTreeMap;

/// Components of the longest path accepted; a `CacheList` takes two per level.
const MAX_DEPTH: usize = 24;

/// A leaf with what was stored under its path, or numbered children.
#[derive(Debug)]
pub(super) enum Node<'a> {
    Leaf(&'a str),
    Branch(BTreeMap<usize, Node<'a>>),
}

impl<'a> Node<'a> {
    /// An empty tree.
    pub(super) fn new() -> Node<'a> {
        Node::Branch(BTreeMap::new())
    }

    /// Puts `leaf` under `path`; says what is wrong with the path if it cannot.
    pub(super) fn insert(&mut self, path: &str, leaf: &'a str) -> Result<(), String> {
        if path.split('.').count() > MAX_DEPTH {
            return Err(format!("path {path:?} is deeper than {MAX_DEPTH}"));
        }
        let mut node = self;
        for part in path.split('.') {
            let index = part.parse::<usize>().ok().filter(|i| i.to_string() == part);
            let index = index.ok_or_else(|| format!("path {path:?}: {part:?} is no index"))?;
            match node {
                Node::Leaf(_) => return Err(format!("path {path:?} goes on below a leaf")),
                Node::Branch(children) => node = children.entry(index).or_insert_with(Node::new),
            }
        }
        match node {
            Node::Branch(children) if children.is_empty() => *node = Node::Leaf(leaf),
            _ => return Err(format!("path {path:?} is a leaf and a branch")),
        }
        Ok(())
    }

    /// The leaf.
    pub(super) fn leaf(&self) -> Option<&'a str> {
        match self {
            Node::Leaf(leaf) => Some(leaf),
            Node::Branch(_) => None,
        }
    }

    /// The children, if they are numbered 0, 1, 2, ... without a gap.
    pub(super) fn children(&self) -> Option<Vec<&Node<'a>>> {
        match self {
            Node::Branch(children) if children.keys().copied().eq(0..children.len()) => {
                Some(children.values().collect())
            }
            _ => None,
        }
    }

    /// Paths of the first `most` leaves, for a message.
    pub(super) fn first_leaves(&self, most: usize) -> Vec<String> {
        let mut leaves = Vec::new();
        self.leaves("", &mut leaves);
        leaves.into_iter().map(|(path, _)| path).take(most).collect()
    }

    /// Path and content of every leaf.
    pub(super) fn leaves(&self, prefix: &str, out: &mut Vec<(String, &'a str)>) {
        match self {
            Node::Leaf(leaf) => out.push((prefix.to_string(), leaf)),
            Node::Branch(children) => {
                for (i, child) in children {
                    let path = if prefix.is_empty() { i.to_string() } else { format!("{prefix}.{i}") };
                    child.leaves(&path, out);
                }
            }
        }
    }
}

/// The strings of a node, if it is a list of leaves.
pub(super) fn strings<'a>(node: &Node<'a>) -> Option<Vec<&'a str>> {
    node.children()?.into_iter().map(Node::leaf).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_sort_as_numbers_and_bad_paths_are_refused() {
        let mut tree = Node::new();
        for path in ["10.0", "2.0", "0", "1"] {
            tree.insert(path, path).unwrap();
        }
        let mut leaves = Vec::new();
        tree.leaves("", &mut leaves);
        assert_eq!(leaves.iter().map(|l| l.1).collect::<Vec<_>>(), ["0", "1", "2.0", "10.0"]);
        assert!(tree.children().is_none(), "3..10 are missing");
        for path in ["0.1", "2", "0", "", "x", "01", "+3", "-1", "3.", "1e3", &"1.".repeat(24)] {
            assert!(tree.insert(path, "").is_err(), "{path:?}");
        }
    }
}
