//! Writes `bindings.rs` as the build script of mlx-sys would, with the half types added.
//!
//! Usage: `mlx-bindings <mlx-sys folder> <half types header> <compiler's include folder> <output file>`

use std::{env, error::Error, path::Path};

/// The settings of mlx-sys itself, so that both systems get the same bindings. `MLX_SYS` is set by `mlx/setup.sh`.
#[allow(dead_code)]
mod config {
    include!(concat!(env!("MLX_SYS"), "/src/bindgen_config.rs"));
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [mlx_sys, half_types, compiler_include, output] = &args[..] else {
        return Err("expected four arguments".into());
    };
    let mlx_c = Path::new(mlx_sys).join("src/mlx-c");
    let headers = config::discover_headers(&mlx_c)?;
    config::builder(&mlx_c, &headers)
        .clang_args(["-include", half_types])
        // The libclang wheel has no stddef.h of its own.
        .clang_args(["-isystem", compiler_include])
        .generate()?
        .write_to_file(output)?;
    Ok(())
}
