//! What a sample run of a model taught: what noise costs on the keys and values of every layer and KV head, as one table.
//!
//! A loss is in nats of KL divergence a token, with one side of one head packed and everything else exact. Where a model can run,
//! losses are measured at every width, since at few bits they rise faster than the distortion of the codes; where it cannot, they are
//! scores times that distortion. The table is a safetensors file that names its version and the shape of its model.

use crate::allocation::head_scores::spectral;
use crate::allocation::{DISTORTION, HeadSide, MOST_BITS, allocate, plan};
use crate::allocation::{HeadScorer, HeadScores};
use crate::codec::frame::covariance;
use crate::error::{Error, Result};
use crate::policy::ModelShape;
use crate::spec::bit_plan::BitPlan;
use crate::spec::{MOST_HEAD_DIM, Side};
use crate::tensor::Tensor;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;

const FORMAT: &str = "turbomoq-calibration";
const VERSION: &str = "1";
/// Loss of a key divided by the loss of a value of the same score.
const KEYS_OVER_VALUES: f64 = 4.0;
const SIDES: [(Side, &str); 2] = [(Side::Key, "key"), (Side::Value, "value")];

/// The table of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    shape: ModelShape,
    source: String,
    /// Of keys and of values, by layer and head, at 1 to 8 bits.
    losses: [Vec<[f64; MOST_BITS]>; 2],
}

/// What shares a width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// Every KV head has its own.
    #[default]
    Head,
    /// The heads of a layer share one, which whole-cache files can hold.
    Layer,
}

impl Calibration {
    /// From the losses of keys and of values, by layer and head; `source` says for people where they come from.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for heads of more than 8192 channels, [`Error::Shape`] if there is not one entry for each head,
    /// [`Error::NonFinite`] for a loss that is not a finite number, or is
    /// below zero.
    pub fn new(
        shape: ModelShape,
        source: &str,
        keys: Vec<[f64; MOST_BITS]>,
        values: Vec<[f64; MOST_BITS]>,
    ) -> Result<Calibration> {
        for dim in [shape.key_dim, shape.value_dim] {
            if dim > MOST_HEAD_DIM {
                let reason = format!("at most {MOST_HEAD_DIM}");
                return Err(Error::Unsupported { field: "head_dim", value: dim.to_string(), reason });
            }
        }
        for (what, losses) in [("key losses", &keys), ("value losses", &values)] {
            if Some(losses.len()) != shape.layers.checked_mul(shape.kv_heads) || losses.is_empty() {
                let expected = format!("{} layers of {} heads", shape.layers, shape.kv_heads);
                return Err(Error::Shape { what, expected, got: vec![losses.len()] });
            }
            let flat = losses.as_flattened();
            if let Some(index) = flat.iter().position(|x| !x.is_finite() || *x < 0.0) {
                return Err(Error::NonFinite { what: what.into(), index, value: flat[index] as f32 });
            }
        }
        Ok(Calibration { shape, source: source.into(), losses: [keys, values] })
    }

    /// From the scores of heads: a loss is the score times the distortion of the codes, and a key counts as four values, which is about
    /// what measured tables say.
    ///
    /// # Errors
    /// As [`Calibration::new`].
    pub fn from_scores(shape: ModelShape, source: &str, scores: &HeadScores) -> Result<Calibration> {
        let losses =
            |factor: f64| scores.scores().iter().map(|s| DISTORTION.map(|d| factor * s * d)).collect();
        Calibration::new(shape, source, losses(KEYS_OVER_VALUES), losses(1.0))
    }

    /// Sizes of the model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Where the table comes from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Refuses another model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names both shapes.
    pub fn check(&self, shape: &ModelShape) -> Result<()> {
        if *shape == self.shape {
            return Ok(());
        }
        let say = |s: &ModelShape| {
            format!("{} layers of {} heads of {}/{}", s.layers, s.kv_heads, s.key_dim, s.value_dim)
        };
        Err(Error::Unsupported {
            field: "calibration",
            value: say(&self.shape),
            reason: format!("the model has {}", say(shape)),
        })
    }

    /// Every head's losses at 1 to 8 bits.
    pub fn parts(&self) -> Vec<HeadSide> {
        let mut parts = vec![];
        for (side, _) in SIDES {
            let channels = match side {
                Side::Key => self.shape.key_dim,
                Side::Value => self.shape.value_dim,
            };
            for (i, &losses) in self.losses[side as usize].iter().enumerate() {
                let (layer, head) = (i / self.shape.kv_heads, i % self.shape.kv_heads);
                parts.push(HeadSide { layer, head, side, channels, losses });
            }
        }
        parts
    }

    /// Widths for all heads at `average` bits per scalar (codes alone), each from `least` to `most` bits.
    ///
    /// # Errors
    /// As [`allocate`].
    pub fn plan(&self, unit: Unit, average: f64, least: u8, most: u8) -> Result<BitPlan> {
        let mut parts = self.parts();
        if unit == Unit::Layer {
            let heads = self.shape.kv_heads;
            let whole = |layer: &[HeadSide]| HeadSide {
                channels: layer.iter().map(|p| p.channels).sum(),
                losses: std::array::from_fn(|i| layer.iter().map(|p| p.losses[i]).sum()),
                ..layer[0].clone()
            };
            parts = parts.chunks_exact(heads).map(whole).collect();
        }
        plan(&parts, &allocate(&parts, average, least, most)?)
    }

    /// The table as a safetensors file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it does not fit the format.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let grid = vec![self.shape.layers, self.shape.kv_heads, MOST_BITS];
        let buffers = SIDES.map(|(side, name)| {
            let losses = self.losses[side as usize].as_flattened();
            (format!("{name}.losses"), losses.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
        });
        let fail = |e: safetensors::SafeTensorError| Error::Unsupported {
            field: "calibration",
            value: self.source.clone(),
            reason: e.to_string(),
        };
        let views = buffers
            .iter()
            .map(|(name, data)| {
                Ok((name.as_str(), TensorView::new(Dtype::F64, grid.clone(), data).map_err(fail)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let shape = format!("{}/{}", self.shape.key_dim, self.shape.value_dim);
        let metadata =
            [("format", FORMAT), ("version", VERSION), ("head_dims", &shape), ("source", &self.source)];
        let metadata: HashMap<_, _> = metadata.map(|(k, v)| (k.to_string(), v.to_string())).into();
        safetensors::serialize(views, Some(metadata)).map_err(fail)
    }

    /// Reads a table.
    ///
    /// # Errors
    /// [`Error::Parse`] says what is wrong with the file, else as [`Calibration::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Calibration> {
        let fail = |reason: String| Error::Parse { what: "calibration", text: "the table".into(), reason };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| fail(e.to_string()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| fail(e.to_string()))?;
        let empty = HashMap::new();
        let metadata = header.metadata().as_ref().unwrap_or(&empty);
        let word = |key: &str| metadata.get(key).map(String::as_str).unwrap_or_default();
        if word("format") != FORMAT || word("version") != VERSION {
            let got = format!("format {:?}, version {:?}", word("format"), word("version"));
            return Err(fail(format!("{got}; this reads {FORMAT:?} of version {VERSION}")));
        }
        let dims =
            word("head_dims").split_once('/').and_then(|(k, v)| Some((k.parse().ok()?, v.parse().ok()?)));
        let Some((key_dim, value_dim)) = dims else {
            return Err(fail(format!("head_dims is {:?}, not K/V", word("head_dims"))));
        };
        let read = |name: &str| -> Result<([usize; 2], Vec<[f64; MOST_BITS]>)> {
            let tensor = tensors.tensor(name).map_err(|e| fail(format!("{name}: {e}")))?;
            let &[layers, heads, MOST_BITS] = tensor.shape() else {
                return Err(fail(format!("{name} has shape {:?}", tensor.shape())));
            };
            if tensor.dtype() != Dtype::F64 {
                return Err(fail(format!("{name} is {:?}, not F64", tensor.dtype())));
            }
            let values = tensor.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b));
            Ok(([layers, heads], values.collect::<Vec<_>>().as_chunks::<MOST_BITS>().0.to_vec()))
        };
        let ((grid, keys), (other, values)) = (read("key.losses")?, read("value.losses")?);
        if grid != other {
            return Err(fail(format!("losses of keys have shape {grid:?}, of values {other:?}")));
        }
        let shape = ModelShape { layers: grid[0], kv_heads: grid[1], key_dim, value_dim };
        Calibration::new(shape, word("source"), keys, values)
    }
}

/// Most channels of a head that is scored: the spectrum of its covariance costs the cube of them.
const MOST_SCORED_CHANNELS: usize = 1024;

/// Scores heads by their keys [B, H, T, D], one array a layer: by spectrum, by the layer's place, and by `sensitivity` if it is
/// known (one number for each layer and head).
///
/// # Errors
/// [`Error::Shape`] if the layers do not agree in H and D, one has no token or heads of more than 1024 channels, or `sensitivity`
/// has another length; [`Error::Dtype`] if keys are no floats; [`Error::NonFinite`] if they are not finite.
pub fn score_heads(layers: &[&Tensor], sensitivity: Option<&[f64]>) -> Result<HeadScores> {
    let mut signals = vec![];
    let mut size = None;
    for keys in layers {
        let (heads, dim) = match *keys.shape() {
            [_, h, t, d] if t > 0 && *size.get_or_insert((h, d)) == (h, d) => (h, d),
            _ => return Err(keys.wrong_shape("keys", format!("[B, H, T > 0, D], (H, D) = {size:?}"))),
        };
        if dim > MOST_SCORED_CHANNELS {
            return Err(keys.wrong_shape("keys", format!("at most {MOST_SCORED_CHANNELS} channels")));
        }
        for head in 0..heads {
            let rows = keys.slice(1, head, head + 1)?.to_f32()?;
            signals.push(spectral(&covariance(&rows, dim), dim));
        }
    }
    let (heads, dim) = size.unwrap_or_default();
    HeadScorer::new(layers.len(), heads, dim).score(&signals, sensitivity)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(prices: &[f64]) -> Vec<[f64; MOST_BITS]> {
        prices.iter().map(|price| DISTORTION.map(|d| price * d)).collect()
    }

    fn table() -> Calibration {
        let shape = ModelShape { layers: 2, kv_heads: 2, key_dim: 64, value_dim: 64 };
        Calibration::new(shape, "a test", losses(&[8.0, 1.0, 1.0, 1.0]), losses(&[0.5; 4])).unwrap()
    }

    #[test]
    fn a_table_reads_back_what_it_writes() {
        let bytes = table().to_bytes().unwrap();
        assert_eq!(Calibration::from_bytes(&bytes).unwrap(), table());
        for end in 0..bytes.len() {
            assert!(Calibration::from_bytes(&bytes[..end]).is_err(), "cut at {end}");
        }
        let foreign = String::from_utf8_lossy(&bytes).replace("calibration", "calibratiom").into_bytes();
        assert!(Calibration::from_bytes(&foreign).is_err());
    }

    #[test]
    fn the_dearest_head_gets_most() {
        let plan = table().plan(Unit::Head, 3.0, 2, 8).unwrap();
        assert!(plan.key.head(0, 0) > plan.key.head(0, 1), "{plan:?}");
        assert!(plan.key.head(0, 1) >= plan.value.head(0, 0));
        let layers = table().plan(Unit::Layer, 3.0, 2, 8).unwrap();
        assert!(layers.key.layer(0).unwrap().len() == 1 && layers.key.head(0, 0) > layers.key.head(1, 0));
    }

    #[test]
    fn another_model_is_refused() {
        let other = ModelShape { layers: 2, kv_heads: 4, key_dim: 64, value_dim: 64 };
        assert!(matches!(table().check(&other), Err(Error::Unsupported { field: "calibration", .. })));
        let (four, eight) = (losses(&[1.0; 4]), losses(&[1.0; 8]));
        assert!(Calibration::new(other, "", four, eight.clone()).is_err());
        assert!(Calibration::new(other, "", losses(&[-1.0; 8]), eight).is_err());
    }
}
