//! Whether the layers of a cache stand at the same token: layers of one model do, unless a file was put together wrongly, a layer was
//! trimmed alone, or a model leaves some of its layers empty.

use super::{Layer, PromptCache};
use crate::error::{Error, Result};
use std::collections::BTreeMap;

impl PromptCache {
    /// Place in the model (`3`, or `3.1` inside a list), class and position of the next token of every layer that has one.
    pub fn offsets(&self) -> Vec<(String, &str, usize)> {
        fn walk<'a>(at: String, layer: &'a Layer, out: &mut Vec<(String, &'a str, usize)>) {
            match layer {
                Layer::List(list) => {
                    list.iter().enumerate().for_each(|(i, layer)| walk(format!("{at}.{i}"), layer, out))
                }
                _ => out.extend(layer.offset().map(|offset| (at, layer.class(), offset))),
            }
        }
        let mut out = vec![];
        self.layers.iter().enumerate().for_each(|(i, layer)| walk(i.to_string(), layer, &mut out));
        out
    }

    /// Refuses layers with different numbers of tokens.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first layer that differs from most.
    pub fn check_even(&self) -> Result<()> {
        let offsets = self.offsets();
        let Some(usual) = usual_offset(offsets.iter().map(|o| o.2)) else { return Ok(()) };
        match offsets.iter().find(|o| o.2 != usual) {
            None => Ok(()),
            Some((at, class, offset)) => Err(Error::Unsupported {
                field: "tokens of a layer",
                value: format!("{offset} in layer {at} ({class})"),
                reason: format!(
                    "the other layers stand at {usual}; to pack them nevertheless, ask for uneven layers"
                ),
            }),
        }
    }
}

/// The offset of most layers, the greater one if two are as frequent.
pub fn usual_offset(offsets: impl IntoIterator<Item = usize>) -> Option<usize> {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    offsets.into_iter().for_each(|offset| *counts.entry(offset).or_default() += 1);
    counts.into_iter().max_by_key(|&(offset, count)| (count, offset)).map(|(offset, _)| offset)
}
