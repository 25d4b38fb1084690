//! The kernel texts, run on the host machine against the row form of the codecs: every launch as a GPU would get it.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod bench;
mod encoding;
#[cfg(feature = "mlx")]
mod mlx;
mod mutations;
mod signature;
mod wrap;

/// `.ci/check-macos` compiles this for a Mac, where a build that has MLX has the Metal kernels without a flag of its own.
#[cfg(all(feature = "mlx", target_os = "macos"))]
const _: () = assert!(turbomoq::internals::engine::mlx::kernels::METAL);
