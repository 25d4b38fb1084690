//! What a sample run of a model taught: what noise costs on the keys and values of every layer and KV head, as one table.
//!
//! A price is the loss (nats of KL divergence a token) that noise as strong as the vectors themselves would cause to second order.
//! It says how heads compare; how the loss of a side falls with the bits is measured where it can be, since at few bits it falls
//! otherwise than the distortion does. The table is a safetensors file that names its version and the shape of its model.

use crate::bit_plan::BitPlan;
use crate::error::{Error, Result};
use crate::policy::ModelShape;
use crate::policy::allocation::{DISTORTION, MOST_BITS, Part, allocate, plan};
use crate::recipe::Recipe;
use crate::spec::Side;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;

const FORMAT: &str = "turbomoq-calibration";
const VERSION: &str = "1";
const SIDES: [(Side, &str); 2] = [(Side::Key, "key"), (Side::Value, "value")];

/// Widths at which the loss of a whole side can be measured: 1 to 4 bits.
pub const MEASURED: usize = 4;

/// The table of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    shape: ModelShape,
    source: String,
    /// Of keys and of values, by layer and head.
    prices: [Vec<f64>; 2],
    /// Mean KL with all keys, and with all values, packed at 1 to 4 bits and the other side exact.
    measured: Option<[[f64; MEASURED]; 2]>,
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
    /// From prices by layer and head; `source` says for people where they come from.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not one price for each head, [`Error::NonFinite`] for one that is not a finite number, or is
    /// below zero.
    pub fn new(shape: ModelShape, source: &str, keys: Vec<f64>, values: Vec<f64>) -> Result<Calibration> {
        for (what, prices) in [("key prices", &keys), ("value prices", &values)] {
            if prices.len() != shape.layers * shape.kv_heads || prices.is_empty() {
                let expected = format!("{} layers of {} heads", shape.layers, shape.kv_heads);
                return Err(Error::Shape { what, expected, got: vec![prices.len()] });
            }
            check(what, prices)?;
        }
        Ok(Calibration { shape, source: source.into(), prices: [keys, values], measured: None })
    }

    /// Adds the measured loss of keys alone and of values alone at 1 to 4 bits.
    ///
    /// # Errors
    /// [`Error::NonFinite`] for a loss that is not a finite number, or is below zero.
    pub fn with_measured(self, losses: [[f64; MEASURED]; 2]) -> Result<Calibration> {
        check("measured losses", losses.as_flattened())?;
        Ok(Calibration { measured: Some(losses), ..self })
    }

    /// Sizes of the model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Where the table comes from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Price of a head.
    pub fn price(&self, side: Side, layer: usize, head: usize) -> Option<f64> {
        let at = (head < self.shape.kv_heads).then(|| layer * self.shape.kv_heads + head)?;
        self.prices[side as usize].get(at).copied()
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
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = vec![];
        for (side, _) in SIDES {
            let (prices, dim) = match side {
                Side::Key => (&self.prices[0], self.shape.key_dim),
                Side::Value => (&self.prices[1], self.shape.value_dim),
            };
            let curve = self.curve(side);
            for (i, price) in prices.iter().enumerate() {
                let (layer, head) = (i / self.shape.kv_heads, i % self.shape.kv_heads);
                parts.push(Part { layer, head, side, channels: dim, losses: curve.map(|d| price * d) });
            }
        }
        parts
    }

    /// Loss of a head of price one at 1 to 8 bits.
    fn curve(&self, side: Side) -> [f64; MOST_BITS] {
        let sum: f64 = self.prices[side as usize].iter().sum();
        let Some(losses) = self.measured.map(|m| m[side as usize]).filter(|_| sum > 0.0) else {
            return DISTORTION;
        };
        let last = MEASURED - 1;
        std::array::from_fn(|i| match losses.get(i) {
            Some(loss) => loss / sum,
            None => losses[last] / sum * DISTORTION[i] / DISTORTION[last],
        })
    }

    /// Widths for all heads at `average` bits a scalar (codes alone), each from `least` to `most` bits.
    ///
    /// # Errors
    /// As [`allocate`].
    pub fn plan(&self, unit: Unit, average: f64, least: u8, most: u8) -> Result<BitPlan> {
        let mut parts = self.parts();
        if unit == Unit::Layer {
            let heads = self.shape.kv_heads;
            let whole = |layer: &[Part]| Part {
                channels: layer.iter().map(|p| p.channels).sum(),
                losses: std::array::from_fn(|i| layer.iter().map(|p| p.losses[i]).sum()),
                ..layer[0].clone()
            };
            parts = parts.chunks_exact(heads).map(whole).collect();
        }
        plan(&parts, &allocate(&parts, average, least, most)?)
    }

    /// A recipe whose bits follow the table.
    ///
    /// # Errors
    /// As [`Calibration::plan`].
    pub fn recipe(&self, recipe: &Recipe, unit: Unit, average: f64, least: u8, most: u8) -> Result<Recipe> {
        Ok(Recipe { plan: Some(self.plan(unit, average, least, most)?), ..recipe.clone() })
    }

    /// The table as a safetensors file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it does not fit the format.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let bytes = |x: &[f64]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let grid = vec![self.shape.layers, self.shape.kv_heads];
        let mut buffers: Vec<(String, Vec<usize>, Vec<u8>)> = vec![];
        for (side, name) in SIDES {
            buffers.push((format!("{name}.prices"), grid.clone(), bytes(&self.prices[side as usize])));
            if let Some(measured) = &self.measured {
                let losses = bytes(&measured[side as usize]);
                buffers.push((format!("{name}.measured"), vec![MEASURED], losses));
            }
        }
        let fail = |e: safetensors::SafeTensorError| Error::Unsupported {
            field: "calibration",
            value: self.source.clone(),
            reason: e.to_string(),
        };
        let views = buffers
            .iter()
            .map(|(name, shape, data)| {
                Ok((name.as_str(), TensorView::new(Dtype::F64, shape.clone(), data).map_err(fail)?))
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
        let read = |name: String| -> Result<Option<(Vec<usize>, Vec<f64>)>> {
            let Ok(tensor) = tensors.tensor(&name) else { return Ok(None) };
            if tensor.dtype() != Dtype::F64 {
                return Err(fail(format!("{name} is {:?}, not F64", tensor.dtype())));
            }
            let (values, _) = tensor.data().as_chunks::<8>();
            Ok(Some((tensor.shape().to_vec(), values.iter().map(|b| f64::from_le_bytes(*b)).collect())))
        };
        let prices = |name: &str| match read(format!("{name}.prices"))? {
            Some((shape, values)) if shape.len() == 2 => Ok((shape, values)),
            Some((shape, _)) => Err(fail(format!("{name}.prices has shape {shape:?}"))),
            None => Err(fail(format!("{name}.prices is missing"))),
        };
        let ((grid, keys), (other, values)) = (prices("key")?, prices("value")?);
        if grid != other {
            return Err(fail(format!("prices of keys have shape {grid:?}, of values {other:?}")));
        }
        let shape = ModelShape { layers: grid[0], kv_heads: grid[1], key_dim, value_dim };
        let table = Calibration::new(shape, word("source"), keys, values)?;
        let losses = |name: &str| -> Result<Option<[f64; MEASURED]>> {
            Ok(read(format!("{name}.measured"))?.and_then(|(_, x)| x.try_into().ok()))
        };
        match (losses("key")?, losses("value")?) {
            (Some(keys), Some(values)) => table.with_measured([keys, values]),
            _ => Ok(table),
        }
    }
}

fn check(what: &str, values: &[f64]) -> Result<()> {
    match values.iter().position(|x| !x.is_finite() || *x < 0.0) {
        Some(index) => Err(Error::NonFinite { what: what.into(), index, value: values[index] as f32 }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Calibration {
        let shape = ModelShape { layers: 2, kv_heads: 2, key_dim: 64, value_dim: 64 };
        Calibration::new(shape, "a test", vec![8.0, 1.0, 1.0, 1.0], vec![0.5; 4]).unwrap()
    }

    #[test]
    fn a_table_reads_back_what_it_writes() {
        let plain = table();
        assert_eq!(Calibration::from_bytes(&plain.to_bytes().unwrap()).unwrap(), plain);
        let measured = plain.with_measured([[1.0, 0.3, 0.1, 0.02], [0.2, 0.06, 0.02, 0.005]]).unwrap();
        let bytes = measured.to_bytes().unwrap();
        assert_eq!(Calibration::from_bytes(&bytes).unwrap(), measured);
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
        assert!(Calibration::new(other, "", vec![1.0; 4], vec![1.0; 8]).is_err());
        assert!(Calibration::new(other, "", vec![-1.0; 8], vec![1.0; 8]).is_err());
    }
}
