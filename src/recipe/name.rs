//! The short text of a recipe: the preset that it is, its bits, and only what differs from the preset.

use super::{DRAFT, PRESETS, Recipe};

/// Bits that presets are tried at, in halves: 16 is exact.
const HALVES: [u8; 16] = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 32];

impl Recipe {
    /// The shortest text that reads back as this recipe: `best@4`, `turboquant-mse@4/2,sinks=2`; the whole text where no preset has
    /// these codecs.
    ///
    /// ```
    /// use turbomoq::Recipe;
    ///
    /// # fn main() -> turbomoq::Result<()> {
    /// let recipe: Recipe = "best@3/2,sinks=4,window=0".parse()?;
    /// assert_eq!(recipe.name(), "best@3/2,window=0");
    /// # Ok(())
    /// # }
    /// ```
    pub fn name(&self) -> String {
        let Some((mut text, base)) = self.preset_and_bits() else { return self.to_string() };
        if self.centred != base.centred {
            text += if self.centred { ",centred" } else { ",not-centred" };
        }
        let exact = [("sinks", self.sinks, base.sinks), ("window", self.window, base.window)];
        for (what, tokens, of_base) in exact {
            if tokens != of_base {
                text += &format!(",{what}={tokens}");
            }
        }
        if self.draft != DRAFT {
            text += &format!(",draft={}", self.draft);
        }
        if let Some(plan) = &self.plan {
            text += &format!(",key-bits={},value-bits={}", plan.key, plan.value);
        }
        text
    }

    /// The preset with these codecs, and the recipe that its name and bits alone give.
    fn preset_and_bits(&self) -> Option<(String, Recipe)> {
        if self.key.is_none() && self.value.is_none() {
            return Some(("exact".into(), Recipe::exact()));
        }
        PRESETS.iter().find_map(|(name, _)| {
            let bits = HALVES.map(|halves| f32::from(halves) / 2.0);
            let at = |k, v| Recipe::preset(name, k, v).ok();
            let key = bits.into_iter().find(|&k| at(k, 16.0).is_some_and(|r| r.key == self.key))?;
            let value = bits.into_iter().find(|&v| at(16.0, v).is_some_and(|r| r.value == self.value))?;
            let text = if key == value { format!("{name}@{key}") } else { format!("{name}@{key}/{value}") };
            Some((text, at(key, value)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_text_reads_back_as_the_recipe_it_names() {
        for text in [
            "best@4",
            "best@3/2",
            "best@2.5/16,not-centred",
            "turboquant-mse@4/2,sinks=2,window=64,draft=0",
            "turboquant-prod@3",
            "kivi@2",
            "mlx-affine@4",
            "exact",
            "exact,window=7",
            "best@4,window=0,key-bits=1-3-6,value-bits=2-2-16",
        ] {
            let recipe: Recipe = text.parse().unwrap();
            assert_eq!(recipe.name(), text);
            assert_eq!(recipe.name().parse::<Recipe>().unwrap(), recipe);
        }
        let own: Recipe =
            "key=d128:b3:equalised:hadamard:trellis10:unbiased:wide8,value=exact".parse().unwrap();
        assert_eq!(own.name(), own.to_string());
    }
}
