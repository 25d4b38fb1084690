//! Kernels through mlx-c's CUDA kernels, which mlx-rs does not wrap.

use super::backend::{Backend, dtype};
use super::plan::{Launch, Value};
use super::{Gpu, KernelSource, header};
use crate::error::Result;
use mlx_rs::error::Exception;
use mlx_rs::{Array, Stream};
use std::ffi::{CString, c_int};

/// A CUDA kernel.
pub(super) struct Cuda(mlx_sys::mlx_fast_cuda_kernel);

fn text(text: &str) -> Result<CString> {
    Ok(CString::new(text).map_err(|e| Exception::custom(e.to_string()))?)
}

fn done(status: c_int, what: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Exception::custom(format!("{what} failed")).into()) }
}

/// A list of names that frees itself.
struct Names(mlx_sys::mlx_vector_string);

impl Names {
    fn new(names: &[&str]) -> Result<Names> {
        let owned = names.iter().map(|n| text(n)).collect::<Result<Vec<_>>>()?;
        let mut pointers: Vec<_> = owned.iter().map(|n| n.as_ptr()).collect();
        // SAFETY: `pointers` holds as many strings as is said, each ended by a zero, and mlx-c copies them.
        Ok(Names(unsafe { mlx_sys::mlx_vector_string_new_data(pointers.as_mut_ptr(), pointers.len()) }))
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        // SAFETY: the handle was made by this type and is freed once.
        unsafe { mlx_sys::mlx_vector_string_free(self.0) };
    }
}

impl Cuda {
    pub(super) fn new(source: &KernelSource) -> Result<Cuda> {
        // Any operation of mlx-rs installs its error handler; without it mlx-c ends the process on an error.
        drop(Array::from_int(0).reshape(&[1]));
        let (key, body, head) =
            (text(&source.key(Gpu::Cuda))?, text(source.body)?, text(&header(Some(Gpu::Cuda)))?);
        let (inputs, outputs) = (Names::new(source.inputs)?, Names::new(source.outputs)?);
        // SAFETY: all strings and lists outlive the call, and mlx-c copies them. Arrays of the block are declared in the text, so
        // no further shared memory is asked for.
        let kernel = unsafe {
            let (body, head) = (body.as_ptr(), head.as_ptr());
            mlx_sys::mlx_fast_cuda_kernel_new(key.as_ptr(), inputs.0, outputs.0, body, head, false, 0)
        };
        done(c_int::from(kernel.ctx.is_null()), "making a CUDA kernel")?;
        Ok(Cuda(kernel))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // SAFETY: the handle was made by this type and is freed once; arrays that wait for evaluation hold their own copy.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_free(self.0) };
    }
}

/// The options of a call, which free themselves.
struct Config(mlx_sys::mlx_fast_cuda_kernel_config);

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: the handle was made by this type and is freed once.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_config_free(self.0) };
    }
}

impl Config {
    fn new(launch: &Launch, inputs: &[&Array]) -> Result<Config> {
        // SAFETY: the constructor has no precondition.
        let config = Config(unsafe { mlx_sys::mlx_fast_cuda_kernel_config_new() });
        done(c_int::from(config.0.ctx.is_null()), "making the options of a CUDA kernel")?;
        for (element, shape) in &launch.outputs {
            let shape: Vec<c_int> = shape.iter().map(|&n| n as c_int).collect();
            // SAFETY: `shape` holds as many sizes as is said and outlives the call.
            let status = unsafe {
                let kind = dtype(*element).into();
                mlx_sys::mlx_fast_cuda_kernel_config_add_output_arg(
                    config.0,
                    shape.as_ptr(),
                    shape.len(),
                    kind,
                )
            };
            done(status, "adding an output")?;
        }
        let ([gx, gy, gz], [tx, ty, tz]) =
            (launch.grid.map(|n| n as c_int), launch.group.map(|n| n as c_int));
        // SAFETY: the handle is valid; sizes are plain numbers.
        let status = unsafe { mlx_sys::mlx_fast_cuda_kernel_config_set_grid(config.0, gx, gy, gz) };
        done(status, "setting the grid")?;
        // SAFETY: as above.
        let status = unsafe { mlx_sys::mlx_fast_cuda_kernel_config_set_thread_group(config.0, tx, ty, tz) };
        done(status, "setting the block")?;
        // SAFETY: as above.
        let status = unsafe { mlx_sys::mlx_fast_cuda_kernel_config_set_verbose(config.0, false) };
        done(status, "setting the options")?;
        // MLX keeps compiled kernels, in files too, by the name and the template alone: what else the text around the body depends
        // on is made part of the template, so that rows of another type are not read by a kernel for the first one's.
        let types = inputs.iter().map(|a| a.dtype()).chain(launch.outputs.iter().map(|(e, _)| dtype(*e)));
        for (i, kind) in types.enumerate() {
            let name = text(&format!("TYPE{i}"))?;
            // SAFETY: the name outlives the call, and mlx-c copies it.
            let status = unsafe {
                let (name, kind) = (name.as_ptr(), kind.into());
                mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_dtype(config.0, name, kind)
            };
            done(status, "adding a type")?;
        }
        for (name, value) in &launch.template {
            let name = text(name)?;
            // SAFETY: the name outlives the call, and mlx-c copies it.
            let status = unsafe {
                match *value {
                    Value::Int(n) => {
                        mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_int(config.0, name.as_ptr(), n)
                    }
                    Value::Type(e) => {
                        let kind = dtype(e).into();
                        mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_dtype(
                            config.0,
                            name.as_ptr(),
                            kind,
                        )
                    }
                }
            };
            done(status, "adding a template value")?;
        }
        Ok(config)
    }
}

/// A list of arrays that frees itself.
struct Arrays(mlx_sys::mlx_vector_array);

impl Drop for Arrays {
    fn drop(&mut self) {
        // SAFETY: the handle was made by this type and is freed once; arrays in it are shared, not owned.
        unsafe { mlx_sys::mlx_vector_array_free(self.0) };
    }
}

impl Backend for Cuda {
    fn apply(&self, launch: &Launch, inputs: &[&Array]) -> Result<Vec<Array>> {
        let config = Config::new(launch, inputs)?;
        let handles: Vec<_> = inputs.iter().map(|a| a.as_ptr()).collect();
        // SAFETY: `handles` holds as many handles as is said, of arrays that outlive the call; the list shares them.
        let list = Arrays(unsafe { mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len()) });
        // SAFETY: the constructor has no precondition.
        let mut results = Arrays(unsafe { mlx_sys::mlx_vector_array_new() });
        let stream = Stream::thread_local_or_gpu();
        // SAFETY: all handles are valid. The launch was planned for these inputs: the text reads inside them by their own strides
        // and lengths, writes every element of its outputs once and no input, and orders accesses of threads by barriers; the
        // host bench in tests/kernels checks each of these for launches of every plan.
        let status = unsafe {
            mlx_sys::mlx_fast_cuda_kernel_apply(&mut results.0, self.0, list.0, config.0, stream.as_ptr())
        };
        done(status, launch.source.name)?;
        (0..launch.outputs.len())
            .map(|i| {
                // SAFETY: `array` is a valid handle that the call replaces; it is owned by the `Array`, which frees it once.
                let (status, array) = unsafe {
                    let mut array = mlx_sys::mlx_array_new();
                    let status = mlx_sys::mlx_vector_array_get(&mut array, results.0, i);
                    (status, Array::from_ptr(array))
                };
                done(status, "reading an output").map(|()| array)
            })
            .collect()
    }
}
