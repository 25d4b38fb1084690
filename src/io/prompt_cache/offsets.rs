//! Whether the layers of a cache stand at the same token: layers of one model do, unless a file was put together wrongly, a layer was
//! trimmed alone, or a model leaves some of its layers empty.

use super::{Layer, PromptCache};
use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// Where a layer stands.
pub(crate) struct Offset {
    /// Place in the model, `3` or `3.1` inside a list.
    at: String,
    class: String,
    /// Position of the next token.
    offset: usize,
}

impl Offset {
    /// Adds the offsets of a layer.
    pub(crate) fn of(at: String, layer: &Layer, out: &mut Vec<Offset>) {
        if let Layer::List(list) = layer {
            return list.iter().enumerate().for_each(|(i, l)| Offset::of(format!("{at}.{i}"), l, out));
        }
        out.extend(layer.offset().map(|offset| Offset { at, class: layer.class().into(), offset }));
    }

    /// As [`PromptCache::check_even`].
    pub(crate) fn check_even(offsets: &[Offset]) -> Result<()> {
        let usual = usual_offsets(offsets.iter().map(|o| (o.at.as_str(), o.offset)));
        match offsets.iter().find(|o| o.offset != usual[place_in_layer(&o.at)]) {
            None => Ok(()),
            Some(Offset { at, class, offset }) => Err(Error::Unsupported {
                field: "tokens of a layer",
                value: format!("{offset} in layer {at} ({class})"),
                reason: format!(
                    "the other layers stand at {}; to pack them nevertheless, ask for uneven layers",
                    usual[place_in_layer(at)]
                ),
            }),
        }
    }
}

impl PromptCache {
    fn layer_offsets(&self) -> Vec<Offset> {
        let mut out = vec![];
        self.layers.iter().enumerate().for_each(|(i, layer)| Offset::of(i.to_string(), layer, &mut out));
        out
    }

    /// Place in the model (`3`, or `3.1` inside a list), class and position of the next token of every layer that has one.
    pub fn offsets(&self) -> Vec<(String, String, usize)> {
        self.layer_offsets().into_iter().map(|o| (o.at, o.class, o.offset)).collect()
    }

    /// Refuses layers with different numbers of tokens. Members of lists are compared with those at the same place in other lists: what
    /// a list holds is the matter of its model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first layer that differs from most.
    pub fn check_even(&self) -> Result<()> {
        Offset::check_even(&self.layer_offsets())
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
