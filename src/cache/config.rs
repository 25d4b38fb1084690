//! A model's cache from its `config.json`, in the names that Hugging Face's configurations use.
//!
//! Layers are counted as mlx-lm caches them: full attention grows with the context; a sliding window needs `layer_types` or a pattern
//! (a bare `sliding_window` is ignored, as most models do that have it); linear attention, state spaces and convolutions have no keys
//! and values; layers that share another one's cache have none of their own. Latent attention (MLA) holds one head: the latent as the
//! key, its rotary part as the value.

use super::models::{Model, Sliding};
use crate::error::{Error, Result};
use serde_json::Value;

/// Most layers, heads or channels that a configuration may name.
const MOST: u64 = 1 << 20;

impl Model {
    /// Reads the text of a `config.json`; `weights` are the bytes of the model's weights, which it does not say.
    ///
    /// ```
    /// use turbomoq::cache::Model;
    ///
    /// # fn main() -> turbomoq::Result<()> {
    /// let text = r#"{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}"#;
    /// let model = Model::from_config("smollm2-135m", text, 76e6)?;
    /// assert_eq!((model.layers, model.kv_heads, model.key_dim), (30, 3, 64));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Parse`] if the text is not JSON, or names a field that is missing or out of range.
    pub fn from_config(name: &str, text: &str, weights: f64) -> Result<Model> {
        let all: Value = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        // Multimodal models have the language model's part inside.
        let config = Config(all.get("text_config").filter(|c| c.is_object()).unwrap_or(&all));
        let heads = config.number(&["num_attention_heads", "n_head", "num_heads"])?;
        let (kv_heads, key_dim, value_dim) = match config.number(&["kv_lora_rank"])? {
            Some(latent) => (1, latent, config.need(&["qk_rope_head_dim"])?),
            None => {
                let kv_heads =
                    config.number(&["num_key_value_heads", "num_kv_heads", "n_head_kv"])?.or(heads);
                let dim = match config.number(&["head_dim"])? {
                    Some(dim) => dim,
                    None => {
                        config.need(&["hidden_size", "n_embd"])?
                            / heads.ok_or_else(|| missing("num_attention_heads"))?
                    }
                };
                (
                    kv_heads.ok_or_else(|| missing("num_key_value_heads"))?,
                    dim,
                    config.number(&["v_head_dim"])?.unwrap_or(dim),
                )
            }
        };
        let kinds = config.kinds()?;
        let count = |kind: Kind| kinds.iter().filter(|k| **k == kind).count();
        let (full, slide) = (count(Kind::Full), count(Kind::Sliding));
        let sliding = match slide {
            0 => None,
            layers => {
                let window = config.need(&["sliding_window", "attention_chunk_size"])?;
                Some(Sliding { layers, window })
            }
        };
        Ok(Model {
            name: name.into(),
            weights,
            layers: full + slide,
            kv_heads,
            key_dim,
            value_dim,
            sliding,
            claim: None,
        })
    }
}

/// What a layer caches.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Full,
    Sliding,
    None,
}

struct Config<'a>(&'a Value);

impl Config<'_> {
    /// The first of these fields that is there and not null.
    fn number(&self, names: &[&str]) -> Result<Option<usize>> {
        for name in names {
            match self.0.get(name) {
                None | Some(Value::Null) => {}
                Some(value) => match value.as_u64() {
                    Some(n) if (1..=MOST).contains(&n) => return Ok(Some(n as usize)),
                    _ => return Err(wrong(format!("{name} = {value}, expected 1 to {MOST}"))),
                },
            }
        }
        Ok(None)
    }

    fn need(&self, names: &[&str]) -> Result<usize> {
        self.number(names)?.ok_or_else(|| missing(names[0]))
    }

    fn list(&self, names: &[&str]) -> Option<&Vec<Value>> {
        names.iter().find_map(|name| self.0.get(name)?.as_array())
    }

    /// What each layer with a cache of its own holds.
    fn kinds(&self) -> Result<Vec<Kind>> {
        let layers = self.need(&["num_hidden_layers", "n_layer", "num_layers"])?;
        let mut kinds = self.kinds_of(layers)?;
        let shared = self.0.get("num_kv_shared_layers").and_then(Value::as_u64).unwrap_or(0) as usize;
        kinds.truncate(layers.saturating_sub(shared));
        Ok(kinds)
    }

    fn kinds_of(&self, layers: usize) -> Result<Vec<Kind>> {
        if let Some(types) = self.list(&["layer_types", "layers_block_type"]) {
            return Ok(types.iter().map(|t| kind_of(t.as_str().unwrap_or_default())).collect());
        }
        if let Some(pattern) = self.0.get("hybrid_override_pattern").and_then(Value::as_str) {
            return Ok(pattern.chars().map(|c| if c == '*' { Kind::Full } else { Kind::None }).collect());
        }
        let full_if = |full: &dyn Fn(usize) -> bool, otherwise: Kind| -> Vec<Kind> {
            (0..layers).map(|i| if full(i) { Kind::Full } else { otherwise }).collect()
        };
        if let Some(indices) = self.list(&["full_attn_idxs", "attn_layer_indices"]) {
            return Ok(full_if(&|i| indices.iter().any(|n| n.as_u64() == Some(i as u64)), Kind::None));
        }
        if let Some(every) = self.number(&["full_attention_interval"])? {
            return Ok(full_if(&|i| (i + 1) % every == 0, Kind::None));
        }
        if let Some(period) = self.number(&["attn_layer_period"])? {
            let offset = self.0.get("attn_layer_offset").and_then(Value::as_u64).unwrap_or(0) as usize;
            return Ok(full_if(&|i| i % period == offset, Kind::None));
        }
        // Gemma 3 leaves its pattern out where it is the usual one.
        let gemma3 =
            self.0.get("model_type").and_then(Value::as_str).is_some_and(|t| t.starts_with("gemma3"));
        let pattern = self.number(&["sliding_window_pattern", "_sliding_window_pattern"])?;
        Ok(match pattern.or(gemma3.then_some(6)) {
            Some(every) => full_if(&|i| (i + 1) % every == 0, Kind::Sliding),
            None => vec![Kind::Full; layers],
        })
    }
}

fn kind_of(layer_type: &str) -> Kind {
    match layer_type {
        "full_attention" | "attention" | "hybrid" => Kind::Full,
        "sliding_attention" | "chunked_attention" => Kind::Sliding,
        _ => Kind::None,
    }
}

fn wrong(reason: String) -> Error {
    Error::Parse { what: "model configuration", text: "config.json".into(), reason }
}

fn missing(field: &str) -> Error {
    wrong(format!("{field} is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model(config: Value) -> Model {
        Model::from_config("m", &config.to_string(), 1e9).unwrap()
    }

    /// Layers with a cache, KV heads, channels of keys and of values, sliding layers and their window.
    fn facts(config: Value) -> [usize; 6] {
        let m = model(config);
        let (layers, window) = m.sliding.map_or((0, 0), |s| (s.layers, s.window));
        [m.layers, m.kv_heads, m.key_dim, m.value_dim, layers, window]
    }

    #[test]
    fn each_way_in_which_models_say_what_their_layers_cache_is_read() {
        let heads = |more: Value| {
            let mut config = json!({"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            config
        };
        for (more, expected) in [
            (json!({}), [12, 2, 64, 64, 0, 0]),
            (json!({"sliding_window": 4096, "use_sliding_window": false}), [12, 2, 64, 64, 0, 0]),
            (json!({"sliding_window": 512, "sliding_window_pattern": 6}), [12, 2, 64, 64, 10, 512]),
            (json!({"sliding_window": 1024, "model_type": "gemma3_text"}), [12, 2, 64, 64, 10, 1024]),
            (json!({"full_attention_interval": 4}), [3, 2, 64, 64, 0, 0]),
            (json!({"attn_layer_period": 8, "attn_layer_offset": 4}), [1, 2, 64, 64, 0, 0]),
            (json!({"full_attn_idxs": [2, 5, 8]}), [3, 2, 64, 64, 0, 0]),
            (json!({"hybrid_override_pattern": "M-M*-MM*-M-M"}), [2, 2, 64, 64, 0, 0]),
            (
                json!({"layer_types": ["sliding_attention", "full_attention", "linear_attention", "conv"], "sliding_window": 128}),
                [2, 2, 64, 64, 1, 128],
            ),
            (json!({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}), [12, 1, 512, 64, 0, 0]),
            (json!({"num_kv_shared_layers": 5}), [7, 2, 64, 64, 0, 0]),
        ] {
            assert_eq!(facts(heads(more.clone())), expected, "{more}");
        }
        let inside = json!({"model_type": "vision", "text_config": heads(json!({"v_head_dim": 32}))});
        assert_eq!(facts(inside), [12, 2, 64, 32, 0, 0]);
    }

    #[test]
    fn the_known_models_are_what_their_configurations_say() {
        let gemma = json!({"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "sliding_window": 1024, "sliding_window_pattern": 6});
        let known = crate::cache::models().unwrap().into_iter().find(|m| m.name == "gemma3-12b").unwrap();
        let read = model(gemma);
        assert_eq!((read.layers, read.sliding, read.kv_heads), (known.layers, known.sliding, known.kv_heads));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let error = |text: &str| Model::from_config("m", text, 0.0).unwrap_err().to_string();
        assert!(error("{").contains("config.json"));
        assert!(error("{}").contains("is missing"));
        assert!(
            error(r#"{"head_dim": 64, "num_key_value_heads": 2}"#).contains("num_hidden_layers is missing")
        );
        assert!(error(r#"{"head_dim": -1, "num_attention_heads": 2}"#).contains("head_dim = -1"));
        let sliding = r#"{"head_dim": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}"#;
        assert!(error(sliding).contains("sliding_window is missing"));
    }
}
