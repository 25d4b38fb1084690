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

    /// Refuses layers with different numbers of tokens. Members of lists are compared with those at the same place in other lists: what
    /// a list holds is the matter of its model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first layer that differs from most.
    pub fn check_even(&self) -> Result<()> {
        let offsets = self.offsets();
        let usual = usual_offsets(offsets.iter().map(|(at, _, offset)| (at.as_str(), *offset)));
        for (at, class, offset) in &offsets {
            let usual = usual[place_in_layer(at)];
            if *offset != usual {
                return Err(Error::Unsupported {
                    field: "tokens of a layer",
                    value: format!("{offset} in layer {at} ({class})"),
                    reason: format!(
                        "the other layers stand at {usual}; to pack them nevertheless, ask for uneven layers"
                    ),
                });
            }
        }
        Ok(())
    }
}

/// The place of a cache inside its layer: nothing for a layer that is no list, `1` for `3.1`.
pub fn place_in_layer(at: &str) -> &str {
    at.split_once('.').map_or("", |(_, inside)| inside)
}

/// The offset of most caches at each place inside a layer, the greater one if two are as frequent.
pub fn usual_offsets<'a>(offsets: impl IntoIterator<Item = (&'a str, usize)>) -> BTreeMap<&'a str, usize> {
    let mut counts: BTreeMap<&str, BTreeMap<usize, usize>> = BTreeMap::new();
    for (at, offset) in offsets {
        *counts.entry(place_in_layer(at)).or_default().entry(offset).or_default() += 1;
    }
    let most = |counts: BTreeMap<usize, usize>| counts.into_iter().max_by_key(|&(offset, n)| (n, offset));
    counts.into_iter().filter_map(|(place, counts)| Some((place, most(counts)?.0))).collect()
}
