//! Which of the two layouts a file has, and access to its leaves.
//!
//! Metadata groups. 0.31: `0.*` meta state per layer, `1.*` user metadata, `2.i` class names. 0.32: `0.*` user
//! metadata, `1.i` class names, `2.*` the table of tensors that stand for a scalar, a string or None, whose entry
//! `2.0` is always the empty string. That entry tells the layouts apart: every other key may be absent from, or
//! mean something in, a file of either (user metadata `{"0": ..}` of 0.32 is a `0.0` too).

use super::Layout;
use super::affine::Packed;
use super::swift;
use super::tree::{Node, strings};
use crate::error::Result;
use crate::io::container::Container;
use crate::io::raw::RawTensor;
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// A file of which the layout is known, not yet its layers.
pub(super) struct OpenedFile<'a> {
    pub(super) file: &'a Container,
    pub(super) layout: Layout,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) classes: Vec<&'a str>,
    pub(super) kinds: BTreeMap<&'a str, &'a str>,
    pub(super) states: BTreeMap<usize, Node<'a>>,
    pub(super) metas: BTreeMap<usize, Node<'a>>,
}

impl<'a> OpenedFile<'a> {
    /// Finds the layout and sorts metadata and tensor names by layer.
    pub(super) fn new(file: &'a Container) -> Result<OpenedFile<'a>> {
        let unknown = |why: String| {
            let keys: Vec<_> = file.metadata.keys().take(6).collect();
            file.bad(format!(
                "not a prompt cache of mlx-lm 0.31 or 0.32: {why}; metadata keys start with {keys:?}"
            ))
        };
        let layout = match file.metadata.get("2.0").map(String::as_str) {
            Some("") => Layout::V032,
            Some(_) => Layout::V031,
            None => return Err(unknown("metadata 2.0 is missing".into())),
        };
        let mut metadata = BTreeMap::new();
        let mut groups = [Node::new(), Node::new(), Node::new()];
        let user = if layout == Layout::V031 { 1 } else { 0 };
        for (key, value) in &file.metadata {
            let (group, path) = match key.split_once('.') {
                Some(("0", path)) => (0, path),
                Some(("1", path)) => (1, path),
                Some(("2", path)) => (2, path),
                _ => return Err(unknown(format!("metadata {key:?} belongs to no known group"))),
            };
            if group == user {
                metadata.insert(path.to_string(), value.clone());
            } else {
                let insert = groups[group].insert(path, value);
                insert.map_err(|e| unknown(format!("metadata group {group}: {e}")))?;
            }
        }
        let [zero, one, two] = groups;
        let (classes, kinds, metas) = match layout {
            Layout::V031 => (two, Node::new(), zero),
            Layout::V032 => (one, two, Node::new()),
        };
        let classes = strings(&classes).ok_or_else(|| unknown("no list of class names".into()))?;
        let kinds = match layout {
            Layout::V031 => BTreeMap::new(),
            Layout::V032 => table(&kinds, file)?,
        };
        let mut states = Node::new();
        for name in file.names() {
            if swift::is_model_state(name) {
                return Err(
                    file.bad(swift::refusal(&format!("model state lies beside the cache ({name:?})")))
                );
            }
            states.insert(name, name).map_err(|e| file.bad(format!("tensor names: {e}")))?;
        }
        let (Node::Branch(states), Node::Branch(metas)) = (states, metas) else {
            return Err(file.bad("a tensor has an empty name"));
        };
        if let Some(i) = states.keys().chain(metas.keys()).find(|&&i| i >= classes.len()) {
            return Err(file.bad(format!("data of layer {i}, but only {} class names", classes.len())));
        }
        Ok(OpenedFile { file, layout, metadata, classes, kinds, states, metas })
    }

    /// Whether a leaf stands for None.
    pub(super) fn is_none(&self, node: &Node) -> bool {
        node.leaf().is_some_and(|name| self.kinds.get(name) == Some(&"none"))
    }

    /// The name of the tensor behind a leaf that stands for an array.
    fn array<'n>(&self, node: &Node<'n>) -> Result<&'n str> {
        let name = node.leaf().ok_or_else(|| {
            let mut below = Vec::new();
            node.leaves("", &mut below);
            self.file.bad(format!("expected one tensor, found {:?}", below.first().map(|l| l.1)))
        })?;
        match self.kinds.get(name) {
            None => Ok(name),
            Some(kind) => Err(self.file.bad(format!("tensor {name:?} stands for a {kind}, not an array"))),
        }
    }

    pub(super) fn tensor(&self, node: &Node) -> Result<Tensor> {
        self.file.tensor(self.array(node)?)
    }

    pub(super) fn optional(&self, node: &Node) -> Result<Option<RawTensor>> {
        if self.is_none(node) { Ok(None) } else { self.file.raw(self.array(node)?).map(Some) }
    }

    pub(super) fn packed(&self, node: &Node) -> Result<Packed> {
        let parts = node.children().unwrap_or_default();
        let [words, scales, biases] = parts[..] else {
            let mut found = Vec::new();
            node.leaves("", &mut found);
            let found: Vec<_> = found.iter().map(|l| l.1).take(6).collect();
            return Err(self.file.bad(format!("expected codes, scales and biases, found {found:?}")));
        };
        let packed =
            Packed { words: self.tensor(words)?, scales: self.tensor(scales)?, biases: self.tensor(biases)? };
        match packed.words.shape() {
            [_, _, _, _] => Ok(packed),
            other => Err(self.file.bad(format!("codes of shape {other:?}, expected [B, H, T, words]"))),
        }
    }

    pub(super) fn string(&self, name: &str) -> Result<String> {
        if self.kinds.get(name) != Some(&"string") {
            return Err(self.file.bad(format!("tensor {name:?} should stand for a string")));
        }
        let points = self.file.integers(name)?;
        points
            .iter()
            .map(|&c| u32::try_from(c).ok().and_then(char::from_u32))
            .collect::<Option<String>>()
            .ok_or_else(|| self.file.bad(format!("tensor {name:?} holds no code points")))
    }
}

/// The table of 0.32: tensor name to kind.
fn table<'a>(node: &Node<'a>, file: &Container) -> Result<BTreeMap<&'a str, &'a str>> {
    let bad = |what: String| file.bad(format!("table of scalars (metadata group 2): {what}"));
    let entries = node.children().ok_or_else(|| bad("entries are missing".into()))?;
    let mut kinds = BTreeMap::new();
    for entry in &entries[1..] {
        let Some([name, kind]) = strings(entry).and_then(|s| <[&str; 2]>::try_from(s).ok()) else {
            return Err(bad("an entry is not (path, kind)".into()));
        };
        file.info(name)?;
        if !["scalar", "string", "none"].contains(&kind) || kinds.insert(name, kind).is_some() {
            return Err(bad(format!("entry ({name:?}, {kind:?}) is of no known kind or comes twice")));
        }
    }
    Ok(kinds)
}
