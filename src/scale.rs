//! The number stored beside a vector's codes: which of four rules it follows, and in which of two formats.
//!
//! A scale code is 16 bits: IEEE half bits, or in the low byte eight bits of log2 with 13 steps an octave. In the log form
//! 0 is zero, 255 is NaN and 1..=254 run from 2^-10 to 2^9.46; rounding adds (ln 2 / 13)^2 / 12 = 2.4e-4 to the relative MSE where
//! the codes do not take it up.

use crate::spec::{ScaleFormat, ScaleRule};
use half::f16;
use std::sync::LazyLock;

/// Steps of the log form an octave.
pub const LOG_STEPS: f32 = 13.0;
/// log2 of the value of log code 1.
pub const LOG_LOW: f32 = -10.0;
/// The log code of NaN.
pub const LOG_NAN: u8 = 255;

/// How far codes may take up the rounding of a scale; beyond the ends of the log form nothing is near.
pub const NEAR: std::ops::Range<f32> = 0.97..1.03;

static LOG_VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|code| match code {
        0 => 0.0,
        255 => f32::NAN,
        _ => libm::exp2((code as f64 - 1.0) / LOG_STEPS as f64 + LOG_LOW as f64) as f32,
    })
});

impl ScaleRule {
    /// Whether the rule looks at <c, y>.
    #[inline(always)]
    pub fn needs_cy(self) -> bool {
        matches!(self, ScaleRule::Unbiased | ScaleRule::LeastSquares)
    }

    /// Whether the rule looks at |c|^2.
    #[inline(always)]
    pub fn needs_cc(self) -> bool {
        matches!(self, ScaleRule::Matched | ScaleRule::LeastSquares)
    }

    /// The usual scale of a vector of |y|^2 on a grid of centroids with this relative MSE, which shrinks vectors by as much.
    #[inline(always)]
    pub fn expected(self, yy: f32, mse: f32, dim: usize) -> f32 {
        let plain = (yy / dim as f32).sqrt();
        match self {
            ScaleRule::Plain | ScaleRule::LeastSquares => plain,
            ScaleRule::Matched => plain / (1.0 - mse).sqrt(),
            ScaleRule::Unbiased => plain / (1.0 - mse),
        }
    }

    /// The scale s for which `s c` stands for the rotated vector y, from |y|^2, <c, y> and |c|^2 over `dim` coordinates.
    ///
    /// A vector of zeros has scale zero; one that the grid cannot see (<c, y> <= 0) falls back to the plain norm.
    #[inline(always)]
    pub fn scale(self, yy: f32, cy: f32, cc: f32, dim: usize) -> f32 {
        let plain = (yy / dim as f32).sqrt();
        if yy == 0.0 {
            return 0.0;
        }
        match self {
            ScaleRule::Plain => plain,
            ScaleRule::Matched if cc > 0.0 => (yy / cc).sqrt(),
            ScaleRule::Unbiased if cy > 0.0 => yy / cy,
            ScaleRule::LeastSquares if cy > 0.0 => cy / cc,
            _ => plain,
        }
    }
}

impl ScaleFormat {
    /// The stored code of a scale. NaN stays NaN; what is too large becomes the largest finite scale.
    #[inline(always)]
    pub fn code(self, scale: f32) -> u16 {
        match self {
            ScaleFormat::F16 if scale.is_nan() => f16::NAN.to_bits(),
            ScaleFormat::F16 => f16::from_f32(scale.clamp(-65504.0, 65504.0)).to_bits(),
            ScaleFormat::Log8 => u16::from(log_code(scale)),
        }
    }

    /// The scale that a code stands for.
    #[inline(always)]
    pub fn value(self, code: u16) -> f32 {
        match self {
            ScaleFormat::F16 => f16::from_bits(code).to_f32(),
            ScaleFormat::Log8 => LOG_VALUES[usize::from(code & 255)],
        }
    }

    /// What unit-variance coordinates are multiplied by before they go on a grid, so that the scale that is `expected` of them becomes
    /// one that a code stands for: the codes take up most of the rounding of the scale.
    #[inline(always)]
    pub fn snap(self, expected: f32) -> f32 {
        match self {
            ScaleFormat::F16 => 1.0,
            ScaleFormat::Log8 => {
                let snap = expected / self.value(self.code(expected));
                if NEAR.contains(&snap) { snap } else { 1.0 }
            }
        }
    }

    /// Dtype of stored scales, as [`crate::Tensor::dtype`] names it.
    pub fn dtype(self) -> &'static str {
        match self {
            ScaleFormat::F16 => "F16",
            ScaleFormat::Log8 => "U8",
        }
    }

    /// Bytes of a stored scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleFormat::F16 => 2,
            ScaleFormat::Log8 => 1,
        }
    }
}

/// The 256 values of the log form, for engines that look them up.
pub fn log_values() -> &'static [f32; 256] {
    &LOG_VALUES
}

fn log_code(scale: f32) -> u8 {
    if scale.is_nan() {
        return LOG_NAN;
    }
    // Below half a step under the least value the nearest code is zero.
    let position = (libm::log2f(scale.max(0.0)) - LOG_LOW) * LOG_STEPS + 1.0;
    if position < 0.5 { 0 } else { (position + 0.5).floor().min(254.0) as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_form_is_within_half_a_step_and_costs_what_is_said() {
        let mut sum = 0f64;
        let n = 100_000;
        for i in 0..n {
            let scale = 2f32.powf(-9.9 + 19.0 * i as f32 / n as f32);
            let back = ScaleFormat::Log8.value(ScaleFormat::Log8.code(scale));
            sum += f64::from(back / scale - 1.0).powi(2);
        }
        let mse = sum / f64::from(n);
        assert!((mse - 2.4e-4).abs() < 1e-5, "{mse}");
    }

    #[test]
    fn special_scales() {
        for format in [ScaleFormat::F16, ScaleFormat::Log8] {
            assert_eq!(format.value(format.code(0.0)), 0.0);
            assert!(format.value(format.code(f32::NAN)).is_nan());
            let top = format.value(format.code(1e30));
            assert!(top.is_finite() && top > 700.0);
            assert_eq!(format.code(top), format.code(f32::INFINITY));
        }
        assert_eq!(ScaleFormat::Log8.value(ScaleFormat::Log8.code(1e-9)), 0.0);
        for code in 0..255 {
            assert_eq!(ScaleFormat::Log8.code(ScaleFormat::Log8.value(code)), code);
        }
    }

    #[test]
    fn rules_keep_their_promise() {
        let y = [3.0f32, -1.0, 2.0, 0.5];
        let c = [1.5f32, -0.5, 1.5, 0.5];
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
        let (yy, cy, cc) = (dot(&y, &y), dot(&c, &y), dot(&c, &c));
        let s = |rule: ScaleRule| rule.scale(yy, cy, cc, 4);
        assert!((s(ScaleRule::Plain) - (yy / 4.0).sqrt()).abs() < 1e-6);
        assert!((s(ScaleRule::Matched).powi(2) * cc - yy).abs() < 1e-4, "norm kept");
        assert!((s(ScaleRule::Unbiased) * cy - yy).abs() < 1e-4, "inner product kept");
        let error = |s: f32| y.iter().zip(&c).map(|(y, c)| (y - s * c).powi(2)).sum::<f32>();
        let best = s(ScaleRule::LeastSquares);
        assert!(error(best) < error(best * 1.01) && error(best) < error(best * 0.99));
    }
}
