//! The number stored beside a vector's codes: which of four rules it follows, and in which of three formats.
//!
//! A scale is zero, positive or NaN, and its code has 16 bits, of which the eight-bit formats use the low byte.
//!
//! | format | codes | scales | relative error |
//! |---|---|---|---|
//! | `f16`, sign bit clear | IEEE half | 2^-14 to 65504 | 2^-12 |
//! | `f16`, sign bit set | the other 15 bits are the top of an f32 whose exponent is 64 lower | 2^-63 to 2^61 | 2^-9 |
//! | `wide8` | 70 to 213: 13 steps an octave; the others: 3 | 2^-6 to 2^5; 2^-29 to 2^18.6 | 2.7 %; 12 % |
//! | `log8` | 13 steps an octave | 2^-10 to 2^9.46 | 2.7 % |
//!
//! In the eight-bit formats 0 is zero and 255 is NaN. Where the steps are fine, rounding adds (ln 2 / 13)^2 / 12 = 2.4e-4 to the
//! relative MSE unless the codes take it up; where they are coarse, the codes of every grid do, see [`ScaleFormat::snap`]. So
//! `wide8` keeps every row of half floats, from one subnormal channel to 65504 in all of them, at the error of its grid. `log8` is
//! what files of format version 1 hold; larger and smaller scales are clamped there. Scales above a format's greatest are stored as
//! the greatest, scales below its least as zero.

use crate::spec::{ScaleFormat, ScaleRule};
use half::f16;
use std::sync::LazyLock;

/// Steps of an octave where they are fine.
pub const FINE_STEPS: f32 = 13.0;
/// Steps of an octave of `wide8` where they are coarse.
pub const COARSE_STEPS: f32 = 3.0;
/// log2 of the value of `log8` code 1.
pub const LOG_LOW: f32 = -10.0;
/// log2 of the scales between which the steps of `wide8` are fine.
pub const FINE: [f32; 2] = [-6.0, 5.0];
/// Codes of `wide8` for the ends of [`FINE`].
pub const FINE_CODES: [f32; 2] = [70.0, 213.0];
/// The eight-bit code of NaN.
pub const LOG_NAN: u8 = 255;
/// The least scale that `f16` holds as a half float; smaller ones and those above 65504 have the sign bit set.
pub const LEAST_HALF: f32 = 1.0 / 16384.0;
/// Bits of the f32 below which a scale of `f16` is zero: 2^-63, which no wide code stands for.
pub const WIDE_BASE: u32 = 64 << 23;

static LOG_VALUES: LazyLock<[f32; 256]> =
    LazyLock::new(|| values(|code| (code - 1.0) / f64::from(FINE_STEPS) + f64::from(LOG_LOW)));

static WIDE_VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let [low, high] = FINE_CODES.map(f64::from);
    let [from, to] = FINE.map(f64::from);
    values(|code| {
        if code < low {
            from + (code - low) / f64::from(COARSE_STEPS)
        } else if code > high {
            to + (code - high) / f64::from(COARSE_STEPS)
        } else {
            from + (code - low) / f64::from(FINE_STEPS)
        }
    })
});

fn values(log2: impl Fn(f64) -> f64) -> [f32; 256] {
    std::array::from_fn(|code| match code {
        0 => 0.0,
        255 => f32::NAN,
        _ => libm::exp2(log2(code as f64)) as f32,
    })
}

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
    /// The stored code of a scale. NaN stays NaN; what is too large becomes the largest scale of the format.
    #[inline(always)]
    pub fn code(self, scale: f32) -> u16 {
        match self {
            ScaleFormat::F16 if scale.is_nan() => f16::NAN.to_bits(),
            ScaleFormat::F16 if scale <= 0.0 => 0,
            ScaleFormat::F16 if (LEAST_HALF..=65504.0).contains(&scale) => f16::from_f32(scale).to_bits(),
            ScaleFormat::F16 => wide_code(scale),
            ScaleFormat::Log8 | ScaleFormat::Wide8 => u16::from(self.log_code(scale)),
        }
    }

    /// The scale that a code stands for.
    #[inline(always)]
    pub fn value(self, code: u16) -> f32 {
        match self {
            ScaleFormat::F16 if code & 0x8000 != 0 => wide_value(code),
            ScaleFormat::F16 => f16::from_bits(code).to_f32(),
            ScaleFormat::Log8 => LOG_VALUES[usize::from(code & 255)],
            ScaleFormat::Wide8 => WIDE_VALUES[usize::from(code & 255)],
        }
    }

    /// The 256 values of an eight-bit format, for engines that look them up.
    pub fn values(self) -> Option<&'static [f32; 256]> {
        match self {
            ScaleFormat::F16 => None,
            ScaleFormat::Log8 => Some(&LOG_VALUES),
            ScaleFormat::Wide8 => Some(&WIDE_VALUES),
        }
    }

    /// What unit-variance coordinates are multiplied by before they go on a grid, so that the scale that is `expected` of them becomes
    /// one that a code stands for: the codes take up most of the rounding of the scale. A trellis does so everywhere, a scalar grid
    /// (`trellis` false) only where the steps are coarse.
    #[inline(always)]
    pub fn snap(self, expected: f32, trellis: bool) -> f32 {
        let nothing = match self {
            ScaleFormat::F16 => true,
            ScaleFormat::Log8 => !trellis,
            ScaleFormat::Wide8 => !trellis && !coarse(expected),
        };
        if nothing {
            return 1.0;
        }
        let snap = expected / self.value(self.code(expected));
        if self.near().contains(&snap) { snap } else { 1.0 }
    }

    /// Relative errors of a rounded scale: half a step and a little. What is outside lies beyond the ends of the format, where the
    /// error has no bound and codes cannot take it up.
    pub fn near(self) -> std::ops::Range<f32> {
        if self == ScaleFormat::Wide8 { 0.89..1.123 } else { 0.97..1.03 }
    }

    fn log_code(self, scale: f32) -> u8 {
        if scale.is_nan() {
            return LOG_NAN;
        }
        let log = libm::log2f(scale.max(0.0));
        let position = match self {
            ScaleFormat::Wide8 if log < FINE[0] => FINE_CODES[0] + (log - FINE[0]) * COARSE_STEPS,
            ScaleFormat::Wide8 if log > FINE[1] => FINE_CODES[1] + (log - FINE[1]) * COARSE_STEPS,
            ScaleFormat::Wide8 => FINE_CODES[0] + (log - FINE[0]) * FINE_STEPS,
            _ => (log - LOG_LOW) * FINE_STEPS + 1.0,
        };
        // Below half a step under the least value the nearest code is zero.
        if position < 0.5 { 0 } else { (position + 0.5).floor().min(254.0) as u8 }
    }

    /// Dtype of stored scales, as [`crate::Tensor::dtype`] names it.
    pub fn dtype(self) -> &'static str {
        match self {
            ScaleFormat::F16 => "F16",
            ScaleFormat::Log8 | ScaleFormat::Wide8 => "U8",
        }
    }

    /// Bytes of a stored scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleFormat::F16 => 2,
            ScaleFormat::Log8 | ScaleFormat::Wide8 => 1,
        }
    }
}

/// Whether the steps of `wide8` are coarse at a scale.
#[inline(always)]
fn coarse(scale: f32) -> bool {
    // 2^-6 and 2^5, the ends of `FINE`.
    !(1.0 / 64.0..=32.0).contains(&scale)
}

/// The `f16` code, sign bit set, of a scale that is no normal half float.
fn wide_code(scale: f32) -> u16 {
    let bits = scale.to_bits();
    // To nearest even at 15 bits of the f32; the greatest code is below that of infinity.
    let rounded = (bits + 0x3fff + (bits >> 15 & 1)).saturating_sub(WIDE_BASE) >> 15;
    if rounded == 0 { 0 } else { 0x8000 | rounded.min(0x7bff) as u16 }
}

fn wide_value(code: u16) -> f32 {
    match u32::from(code & 0x7fff) {
        0 => 0.0,
        0x7c00.. => f32::NAN,
        top => f32::from_bits((top << 15) + WIDE_BASE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fine_steps_are_within_half_a_step_and_cost_what_is_said() {
        for (format, low, high) in [(ScaleFormat::Log8, -9.9, 9.1), (ScaleFormat::Wide8, -6.0, 5.0)] {
            let mut sum = 0f64;
            let n = 100_000;
            for i in 0..n {
                let scale = 2f32.powf(low + (high - low) * i as f32 / n as f32);
                let back = format.value(format.code(scale));
                sum += f64::from(back / scale - 1.0).powi(2);
            }
            let mse = sum / f64::from(n);
            assert!((mse - 2.4e-4).abs() < 1e-5, "{format}: {mse}");
        }
    }

    #[test]
    fn scales_of_half_float_rows_are_within_half_a_step() {
        // From one least subnormal in 512 channels to twice the greatest half float (a centred row) on a grid of one bit.
        let (low, high) = (2.6e-9f32.log2(), 210_000f32.log2());
        for i in 0..=100_000 {
            let scale = 2f32.powf(low + (high - low) * i as f32 / 1e5);
            let off = |format: ScaleFormat| (format.value(format.code(scale)) / scale - 1.0).abs();
            assert!(off(ScaleFormat::F16) < 1.0 / 511.0, "{scale}");
            assert!(off(ScaleFormat::Wide8) < 0.1226, "{scale}");
            let snap = ScaleFormat::Wide8.snap(scale, true);
            assert!(
                (snap * ScaleFormat::Wide8.value(ScaleFormat::Wide8.code(scale)) / scale - 1.0).abs() < 1e-6
            );
            if (6.2e-5..=65504.0).contains(&scale) {
                assert_eq!(ScaleFormat::F16.code(scale), f16::from_f32(scale).to_bits(), "as a half float");
            }
        }
        for scale in [1e-18f32, 1e-12, 1e7, 1e12, 1e18] {
            let back = ScaleFormat::F16.value(ScaleFormat::F16.code(scale));
            assert!((back / scale - 1.0).abs() < 1.0 / 511.0, "{scale}: {back}");
        }
        // Where its steps are fine, `wide8` has the values of `log8`.
        for code in 70..=213u16 {
            assert_eq!(ScaleFormat::Wide8.value(code), ScaleFormat::Log8.value(code - 17));
        }
    }

    #[test]
    fn special_scales() {
        for format in [ScaleFormat::F16, ScaleFormat::Log8, ScaleFormat::Wide8] {
            assert_eq!(format.value(format.code(0.0)), 0.0);
            assert!(format.value(format.code(f32::NAN)).is_nan());
            let top = format.value(format.code(1e30));
            assert!(top.is_finite() && top > 700.0);
            assert_eq!(format.code(top), format.code(f32::INFINITY));
            assert_eq!(format.value(format.code(1e-30)), 0.0, "{format}");
        }
        for (format, codes) in [
            (ScaleFormat::Log8, 0..255),
            (ScaleFormat::Wide8, 0..255),
            (ScaleFormat::F16, 0x400..0x7c00),
            (ScaleFormat::F16, 0x8001..0xfc00),
        ] {
            for code in codes {
                let value = format.value(code);
                let in_half =
                    format == ScaleFormat::F16 && code >= 0x8000 && (LEAST_HALF..=65504.0).contains(&value);
                assert!(in_half || format.code(value) == code, "{format} {code:#x}: {value}");
            }
        }
        assert!((0x7c01..0x8000).chain(0xfc01..=0xffff).all(|nan| ScaleFormat::F16.value(nan).is_nan()));
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
