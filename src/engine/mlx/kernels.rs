//! Fused GPU kernels: one text of every kernel for Metal, CUDA and the host machine that the tests run it on.
//!
//! The bodies are in `mlx/kernels`, in a common subset of the three dialects with a prelude for each. [`find`] says which stages of
//! which codecs have a kernel; everything else stays an array graph. What a call needs beside its arrays is a [`plan::Launch`],
//! which the tests run on the host as it stands, so a launch is tested where no GPU is.

mod apply;
mod backend;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", all(feature = "mlx", target_os = "macos")))]
mod metal;
pub mod plan;
pub mod turn;

pub use apply::Kernels;

use crate::codec::{BandGrid, Codec};
use crate::math::rotation::Rotation;
use crate::spec::{Residual, ScaleFormat};

/// Whether the Metal kernels are in this build: on macOS always, on other systems only to be type-checked (feature `metal`).
pub const METAL: bool = cfg!(any(feature = "metal", all(feature = "mlx", target_os = "macos")));

/// GPUs that kernels run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// Apple GPUs.
    Metal,
    /// NVIDIA GPUs.
    Cuda,
}

/// What a kernel replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Vectors in their frame to words and scales.
    Encode,
    /// Words and scales to rows in the rotated domain.
    Decode,
    /// Attention on keys or values of this codec.
    Attend,
}

/// How a row is stored, with the numbers that the texts use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    /// Channels as they are.
    Exact = 0,
    /// Equal steps about zero.
    Uniform = 1,
    /// A table whose lower half is the upper one with the sign changed, kept as magnitudes.
    Mirrored = 2,
    /// Any table.
    Table = 3,
    /// Windows of 8 bits.
    Trellis8 = 4,
    /// Windows of 10 bits.
    Trellis10 = 5,
}

/// What a kernel must know of a codec when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// How codes become levels.
    pub kind: Kind,
    /// Bits of a code; 16 for exact rows.
    pub bits: u8,
    /// Channels.
    pub dim: usize,
    /// A second band of the same kind behind the first: bits of its codes, and channels.
    pub second: Option<(u8, usize)>,
}

/// Most channels of a row: a thread of an encoder is a channel.
const MOST_CHANNELS: usize = 512;

impl Form {
    /// Rows that are not packed.
    pub fn exact(dim: usize) -> Form {
        Form { kind: Kind::Exact, bits: 16, dim, second: None }
    }

    /// The form of a codec of one or two bands without a residual, if it has one.
    pub fn of(codec: &Codec) -> Option<Form> {
        let (band, second) = match codec.bands() {
            [band] => (band, None),
            [band, second] => (band, Some(second)),
            _ => return None,
        };
        // The texts read eight bits of a scale as `wide8`.
        if codec.channel().is_some()
            || codec.format() == ScaleFormat::Log8
            || codec.spec().residual != Residual::None
            || codec.bands().iter().any(|b| b.dim > MOST_CHANNELS)
        {
            return None;
        }
        let kind = kind(&band.grid)?;
        if second.is_some_and(|b| self::kind(&b.grid) != Some(kind)) {
            return None;
        }
        Some(Form { kind, bits: band.bits, dim: band.dim, second: second.map(|b| (b.bits, b.dim)) })
    }

    /// Channels of all bands.
    pub fn channels(&self) -> usize {
        self.dim + self.second.map_or(0, |(_, dim)| dim)
    }

    /// Words, or exact channels, of a row.
    pub fn words(&self) -> usize {
        if self.kind == Kind::Exact {
            return self.dim;
        }
        crate::math::bits::words(self.dim, self.bits)
            + self.second.map_or(0, |(bits, dim)| crate::math::bits::words(dim, bits))
    }
}

fn kind(grid: &BandGrid) -> Option<Kind> {
    Some(match grid {
        BandGrid::Affine => return None,
        BandGrid::Trellis(trellis) if trellis.states_log2 == 8 => Kind::Trellis8,
        BandGrid::Trellis(_) => Kind::Trellis10,
        BandGrid::Scalar(grid) if grid.step().is_some() => Kind::Uniform,
        BandGrid::Scalar(grid) => {
            let levels = grid.levels();
            let mirrored = levels.iter().zip(levels.iter().rev()).all(|(a, b)| *a == -*b);
            if mirrored { Kind::Mirrored } else { Kind::Table }
        }
    })
}

/// The table that decoders read, of each band one behind the other: the step of a uniform grid, the upper half of mirrored levels,
/// the first half of a trellis, or all levels.
pub fn table(codec: &Codec, form: Form) -> Vec<f32> {
    let of = |grid: &BandGrid| match (form.kind, grid) {
        (Kind::Uniform, BandGrid::Scalar(grid)) => vec![grid.step().unwrap_or(1.0)],
        (Kind::Mirrored, BandGrid::Scalar(grid)) => grid.levels()[grid.levels().len() / 2..].to_vec(),
        (_, BandGrid::Scalar(grid)) => grid.levels().to_vec(),
        (_, BandGrid::Trellis(trellis)) => trellis.levels()[..trellis.levels().len() / 2].to_vec(),
        (_, BandGrid::Affine) => vec![],
    };
    codec.bands().iter().flat_map(|band| of(&band.grid)).collect()
}

/// The tables that encoders read beside the signs of the rotation: its factor, all levels, the borders.
pub struct EncodeTables {
    /// Signs, one per channel; empty without a rotation.
    pub signs: Vec<f32>,
    /// Row-major factor of the rotation; one entry for a power of two.
    pub factor: Vec<f32>,
    /// Order of the factor.
    pub order: usize,
    /// All levels; of a trellis in the order of windows.
    pub levels: Vec<f32>,
    /// Upper borders of all codes but the last; for a uniform grid 1 / step first.
    pub borders: Vec<f32>,
}

/// Tables for the encoder of a codec that has a form; `None` for a dense rotation and for two bands.
pub fn encode_tables(codec: &Codec) -> Option<EncodeTables> {
    let [band] = codec.bands() else { return None };
    let (signs, factor, order) = match &band.rotation {
        Rotation::Identity => (vec![], vec![1.0], 1),
        Rotation::Hadamard { signs, factor, order } if *order > 1 => (signs.clone(), factor.clone(), *order),
        Rotation::Hadamard { signs, .. } => (signs.clone(), vec![1.0], 1),
        Rotation::Dense { .. } => return None,
    };
    let (levels, mut borders) = match &band.grid {
        BandGrid::Scalar(grid) => (grid.levels().to_vec(), grid.borders().to_vec()),
        BandGrid::Trellis(trellis) => (trellis.levels().to_vec(), vec![0.0]),
        BandGrid::Affine => return None,
    };
    if let Some(step) = band.grid.scalar().and_then(|g| g.step()) {
        borders[0] = 1.0 / step;
    }
    Some(EncodeTables { signs, factor, order, levels, borders })
}

/// The form in which a kernel does a stage of a codec on a GPU; `None` where the array graph does it.
pub fn find(stage: Stage, codec: &Codec, gpu: Option<Gpu>) -> Option<Form> {
    gpu?;
    let form = Form::of(codec)?;
    // Bands are encoded and decoded apart from each other.
    if stage != Stage::Attend && form.second.is_some() {
        return None;
    }
    if stage == Stage::Encode {
        encode_tables(codec)?;
        let (most, ring) = match form.kind {
            Kind::Trellis10 => (256, form.dim * usize::from(form.bits)),
            Kind::Trellis8 => (MOST_CHANNELS, form.dim * usize::from(form.bits)),
            _ => (MOST_CHANNELS, usize::MAX),
        };
        // Longer searches do not fit the memory of a threadgroup; rings below 64 bits are searched in another way.
        if form.dim > most || ring < 64 {
            return None;
        }
    }
    Some(form)
}

/// A kernel text: its body and the names of its arguments, in the order of the signature.
#[derive(Debug)]
pub struct KernelSource {
    /// What it does.
    pub name: &'static str,
    /// The text inside the function.
    pub body: &'static str,
    /// Inputs.
    pub inputs: &'static [&'static str],
    /// Outputs.
    pub outputs: &'static [&'static str],
}

const COMMON: [&str; 3] = [
    include_str!("../../../mlx/kernels/common.h"),
    include_str!("../../../mlx/kernels/rows.h"),
    include_str!("../../../mlx/kernels/attend.h"),
];

/// What stands before every body on a GPU, or, without one, on the host machine that the tests run the kernels on.
pub fn header(gpu: Option<Gpu>) -> String {
    let prelude = match gpu {
        Some(Gpu::Metal) => include_str!("../../../mlx/kernels/prelude_metal.h"),
        Some(Gpu::Cuda) => include_str!("../../../mlx/kernels/prelude_cuda.h"),
        None => include_str!("../../../mlx/kernels/prelude_host.h"),
    };
    format!("{prelude}\n{}", COMMON.join("\n"))
}

impl KernelSource {
    /// The name under which MLX caches the compiled kernel: it carries a hash of everything that is compiled.
    pub fn key(&self, gpu: Gpu) -> String {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for byte in header(Some(gpu)).bytes().chain(self.body.bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        format!("turbomoq_{}_{hash:016x}", self.name)
    }
}

/// First pass of attention on a segment.
pub static ATTEND: KernelSource = KernelSource {
    name: "attend",
    body: include_str!("../../../mlx/kernels/attend.inc"),
    inputs: &[
        "queries", "k_words", "k_scales", "k_levels", "v_words", "v_scales", "v_levels", "bias", "mask",
        "first", "tokens", "limits", "place",
    ],
    outputs: &["part_sums", "part_state"],
};

/// Second pass: joins shares of a segment, or segments and sinks.
pub static MERGE: KernelSource = KernelSource {
    name: "merge",
    body: include_str!("../../../mlx/kernels/merge.inc"),
    inputs: &["sums", "state", "sinks", "counts"],
    outputs: &["all_sums", "all_state"],
};

/// Unpacks rows in the rotated domain.
pub static DEQUANTIZE: KernelSource = KernelSource {
    name: "dequantize",
    body: include_str!("../../../mlx/kernels/dequantize.inc"),
    inputs: &["words", "scales", "levels", "tokens"],
    outputs: &["rows"],
};

/// Packs vectors on a scalar grid.
pub static ENCODE: KernelSource = KernelSource {
    name: "encode",
    body: include_str!("../../../mlx/kernels/encode.inc"),
    inputs: &["vectors", "signs", "factor", "levels", "borders", "place"],
    outputs: &["words", "scales"],
};

/// Packs vectors on a trellis.
pub static ENCODE_TRELLIS: KernelSource = KernelSource {
    name: "encode_trellis",
    body: include_str!("../../../mlx/kernels/encode_trellis.inc"),
    inputs: &["vectors", "signs", "factor", "levels", "place"],
    outputs: &["words", "scales"],
};

/// Queries into the domain of packed keys.
pub static ENTER: KernelSource = KernelSource {
    name: "enter",
    body: include_str!("../../../mlx/kernels/enter.inc"),
    inputs: &["queries", "centre", "gain", "order", "signs", "factor", "scale", "place"],
    outputs: &["rotated", "bias"],
};

/// Second pass where at most one segment is packed: joins all shares and leaves its domain.
pub static FINISH: KernelSource = KernelSource {
    name: "finish",
    body: include_str!("../../../mlx/kernels/finish.inc"),
    inputs: &[
        "sums", "state", "sums1", "state1", "sums2", "state2", "sinks", "centre", "gain", "order", "signs",
        "factor", "place",
    ],
    outputs: &["out"],
};

/// All kernels.
pub static SOURCES: [&KernelSource; 7] =
    [&ATTEND, &MERGE, &DEQUANTIZE, &ENCODE, &ENCODE_TRELLIS, &ENTER, &FINISH];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{CodecSpec, Grid, RotationKind};

    #[test]
    fn what_has_a_kernel() {
        let has =
            |stage, spec: CodecSpec, device| find(stage, &Codec::new(spec).unwrap(), device).map(|f| f.kind);
        let spec = CodecSpec::new(128, 4, Grid::Lloyd);
        let (attend, encode) = (Stage::Attend, Stage::Encode);
        assert_eq!(has(attend, spec, None), None);
        assert_eq!(has(attend, spec, Some(Gpu::Metal)), Some(Kind::Mirrored));
        assert_eq!(
            has(encode, CodecSpec { grid: Grid::Uniform, ..spec }, Some(Gpu::Cuda)),
            Some(Kind::Uniform)
        );
        let dense = CodecSpec { rotation: RotationKind::Dense, ..spec };
        assert_eq!(
            (has(encode, dense, Some(Gpu::Metal)), has(attend, dense, Some(Gpu::Metal)).is_some()),
            (None, true)
        );
        let trellis = |states, dim, bits| CodecSpec {
            grid: Grid::Trellis { states },
            ..CodecSpec::new(dim, bits, Grid::Lloyd)
        };
        assert_eq!(has(encode, trellis(8, 128, 2), Some(Gpu::Metal)), Some(Kind::Trellis8));
        assert_eq!(has(encode, trellis(8, 32, 1), Some(Gpu::Metal)), None, "a short ring");
        assert_eq!(has(encode, trellis(10, 512, 2), Some(Gpu::Metal)), None, "a long search");
        let two = CodecSpec { outliers: 32, bits: 2, ..spec };
        assert_eq!(
            [has(attend, two, Some(Gpu::Metal)), has(encode, two, Some(Gpu::Metal))],
            [Some(Kind::Mirrored), None]
        );
        let affine = CodecSpec { grid: Grid::Affine { group: 64 }, ..spec };
        assert_eq!(has(attend, affine, Some(Gpu::Metal)), None);
    }

    #[test]
    fn names_carry_a_hash_of_the_text() {
        let mut keys: Vec<String> =
            SOURCES.iter().flat_map(|s| [Gpu::Metal, Gpu::Cuda].map(|gpu| s.key(gpu))).collect();
        assert!(keys.iter().all(|k| k.rsplit('_').next().unwrap().len() == 16));
        let changed = KernelSource { body: "// nothing", ..*SOURCES[1] };
        keys.push(changed.key(Gpu::Metal));
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 15);
    }
}
