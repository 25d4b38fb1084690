//! Bits of every layer and KV head: how a budget is spread over a model, as plain data with a text form.
//!
//! Widths are written layer by layer, joined by `-`; a layer is one width for all of its heads or one for each, joined by `.`:
//! `3-3-2.4.2-3`. A width is 1 to 8 bits, or 16 for a head that stays exact.

use crate::error::{Error, Result};
use crate::spec::Side;
use std::fmt;
use std::str::FromStr;

/// Bits of one side, for each layer one width or one for each KV head.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Widths(Vec<Vec<u8>>);

/// Bits of keys and values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BitPlan {
    /// Of keys.
    pub key: Widths,
    /// Of values.
    pub value: Widths,
}

impl Widths {
    /// From a list of widths for each layer. Equal widths of all heads become one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer without widths, or a width that is neither 1 to 8 nor 16.
    pub fn new(layers: Vec<Vec<u8>>) -> Result<Widths> {
        let no = |value: String, reason: &str| {
            Err(Error::Unsupported { field: "bits of a head", value, reason: reason.into() })
        };
        let mut layers = layers;
        for (i, layer) in layers.iter_mut().enumerate() {
            let Some(&first) = layer.first() else { return no(format!("none in layer {i}"), "one or more") };
            if let Some(bad) = layer.iter().find(|b| !matches!(b, 1..=8 | 16)) {
                return no(bad.to_string(), "1 to 8, or 16");
            }
            if layer.iter().all(|&b| b == first) {
                layer.truncate(1);
            }
        }
        Ok(Widths(layers))
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.0.len()
    }

    /// Widths of a layer: one for all heads, or one for each.
    pub fn layer(&self, layer: usize) -> Option<&[u8]> {
        self.0.get(layer).map(Vec::as_slice)
    }

    /// Width of a head.
    pub fn head(&self, layer: usize, head: usize) -> Option<u8> {
        let layer = self.0.get(layer)?;
        if layer.len() == 1 { layer.first().copied() } else { layer.get(head).copied() }
    }
}

impl BitPlan {
    /// The widths of a side.
    pub fn side(&self, side: Side) -> &Widths {
        match side {
            Side::Key => &self.key,
            Side::Value => &self.value,
        }
    }
}

impl fmt::Display for Widths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layer = |heads: &Vec<u8>| heads.iter().map(u8::to_string).collect::<Vec<_>>().join(".");
        f.write_str(&self.0.iter().map(layer).collect::<Vec<_>>().join("-"))
    }
}

impl FromStr for Widths {
    type Err = Error;
    fn from_str(text: &str) -> Result<Widths> {
        let width = |t: &str| {
            t.parse::<u8>().map_err(|_| Error::Parse {
                what: "bits of heads",
                text: text.into(),
                reason: format!("{t:?} is no width; expected layers such as 3-3-2.4.2"),
            })
        };
        let layers = text.split('-').map(|layer| layer.split('.').map(width).collect());
        Widths::new(layers.collect::<Result<_>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_read_back_what_they_write() {
        let widths: Widths = "3-3.3-2.4.16".parse().unwrap();
        assert_eq!(widths.to_string(), "3-3-2.4.16");
        assert_eq!(widths.to_string().parse::<Widths>().unwrap(), widths);
        assert_eq!((widths.layers(), widths.head(1, 5), widths.head(2, 1)), (3, Some(3), Some(4)));
        assert_eq!((widths.head(2, 3), widths.head(3, 0)), (None, None));
        for bad in ["", "3-", "9", "0-3", "3.x", "3--3"] {
            assert!(bad.parse::<Widths>().is_err(), "{bad:?}");
        }
    }
}
