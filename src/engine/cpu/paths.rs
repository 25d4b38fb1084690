//! Which forms and fallbacks of the fused attention have run: a counter for each.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! paths {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A form or a fallback of the fused attention.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Path {
            $($(#[$doc])* $name,)*
        }

        impl Path {
            /// All of them.
            pub const ALL: &[Path] = &[$(Path::$name,)*];
        }
    };
}

paths! {
    /// Scores of a block of packed tokens in integers.
    IntegerScores,
    /// A query row too uneven for eight bits.
    UnevenQuery,
    /// A head of which every query row is too uneven.
    OnlyUnevenQueries,
    /// A block whose uneven query rows are scored again on decoded rows.
    UnevenRescored,
    /// A grid in bytes at a width or at bits that integer scores have no form for.
    NoIntegerForm,
    /// Queries that the caller wants exact.
    ExactAsked,
    /// Scores of a block of decoded rows.
    FloatScores,
    /// Scores of a block with a residual's estimator.
    ResidualScores,
    /// Weighted sums of a block in integers.
    IntegerSums,
    /// Weights that are not finite, where sums in integers were possible.
    WeightsNotFinite,
    /// A block of more tokens than sums in integers hold.
    BlockTooLong,
    /// Weighted sums of a block of decoded rows.
    FloatSums,
    /// A block of which some tokens have no weight.
    SomeTokensSkipped,
    /// A block of which no token has weight.
    BlockSkipped,
    /// A row with NaN or infinity that only some queries use.
    RowNotFinite,
    /// A query that has seen nothing yet.
    NothingSeen,
    /// Levels of up to four bits, by tables.
    SmallLevels,
    /// Levels of one trellis band.
    TrellisLevels,
    /// Levels of several trellis bands.
    TrellisBands,
    /// Tiles of channels.
    ChannelTiles,
    /// Rows of one band, unpacked one by one.
    OneBand,
    /// Rows with scales of their own bands, unpacked one by one.
    ManyBands,
    /// Rows that were never packed.
    ExactRows,
    /// Tokens beyond the fours of the AVX-512 integer scores.
    TokensBeyondFours,
    /// A width without AVX-512 integer scores.
    NarrowIntegers,
    /// Levels of a width that the AVX-512 form does not take.
    NarrowLevels,
    /// Tiles of a width that the AVX-512 forms do not take.
    NarrowTile,
    /// Trellis rows of a shape that is gathered rather than looked up in registers.
    TrellisGathered,
}

impl Path {
    /// Whether only a machine with AVX-512 takes it.
    pub fn needs_avx512(self) -> bool {
        use Path::*;
        matches!(
            self,
            IntegerSums
                | WeightsNotFinite
                | BlockTooLong
                | TokensBeyondFours
                | NarrowIntegers
                | NarrowLevels
                | NarrowTile
                | TrellisGathered
        )
    }
}

const PATHS: usize = Path::ALL.len();

static COUNTS: [AtomicU64; PATHS] = [const { AtomicU64::new(0) }; PATHS];

thread_local! {
    /// Counts of this thread that are not in [`COUNTS`] yet: threads do not wait for one another in the middle of a block.
    static MINE: [Cell<u64>; PATHS] = const { [const { Cell::new(0) }; PATHS] };
}

/// Counts a form on this thread.
#[inline]
pub(super) fn note(path: Path) {
    MINE.with(|mine| mine[path as usize].set(mine[path as usize].get() + 1));
}

/// Adds what this thread has counted to the counts of the process.
pub(super) fn flush() {
    MINE.with(|mine| {
        for (mine, all) in mine.iter().zip(&COUNTS) {
            let n = mine.take();
            if n > 0 {
                all.fetch_add(n, Ordering::Relaxed);
            }
        }
    });
}

/// How often a form has run in this process.
pub fn count(path: Path) -> u64 {
    COUNTS[path as usize].load(Ordering::Relaxed)
}
