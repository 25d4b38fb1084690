//! Instruction sets that kernels have forms for, and what this machine has of them.

/// Instruction sets with forms of their own, each with those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(in crate::engine::cpu) enum Level {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Foundation, BW, VL, VNNI and VBMI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with products of bytes that are summed as they are formed.
    #[cfg(target_arch = "aarch64")]
    Dot,
}

/// The levels that this machine has, the greatest first.
pub(in crate::engine::cpu) fn available() -> &'static [Level] {
    let most = MOST.replace(LEVELS[0]);
    let has = level();
    MOST.set(most);
    &LEVELS[LEVELS.iter().position(|l| *l <= has).unwrap_or(0)..]
}

/// What the machine has, and a test lets this thread use.
#[cfg(target_arch = "x86_64")]
pub(super) fn level() -> Level {
    let has = if !(is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c"))
    {
        Level::Plain
    } else if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
    {
        Level::Avx512
    } else {
        Level::Avx2
    };
    has.min(MOST.get())
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn level() -> Level {
    Level::Plain
}

#[cfg(target_arch = "aarch64")]
pub(super) fn level() -> Level {
    use std::arch::is_aarch64_feature_detected as detected;
    let has = match (detected!("neon"), detected!("dotprod")) {
        (false, _) => Level::Plain,
        (true, false) => Level::Neon,
        (true, true) => Level::Dot,
    };
    has.min(MOST.get())
}

/// The levels of this architecture, the greatest first.
pub(in crate::engine::cpu) const LEVELS: &[Level] = &[
    #[cfg(target_arch = "x86_64")]
    Level::Avx512,
    #[cfg(target_arch = "x86_64")]
    Level::Avx2,
    #[cfg(target_arch = "aarch64")]
    Level::Dot,
    #[cfg(target_arch = "aarch64")]
    Level::Neon,
    Level::Plain,
];

thread_local! {
    /// The highest level that a test wants on this thread.
    pub(in crate::engine::cpu) static MOST: std::cell::Cell<Level> = const { std::cell::Cell::new(LEVELS[0]) };
}
