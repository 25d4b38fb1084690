//! Launches on MLX's GPU: the compiled kernels of a device, made once each, and the call.

use super::backend::Backend;
use super::plan::Launch;
use super::{Gpu, KernelSource};
use crate::error::{Error, Result};
use mlx_rs::Array;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Runs launches in another way than MLX does.
type Elsewhere = dyn Fn(&Launch, &[&Array]) -> Result<Vec<Array>>;

/// The kernels of a GPU.
#[derive(Default)]
pub struct Kernels {
    gpu: Option<Gpu>,
    made: RefCell<HashMap<&'static str, Rc<dyn Backend>>>,
    elsewhere: Option<Box<Elsewhere>>,
}

impl Kernels {
    /// Kernels of the GPU that MLX runs on, if this build has any for it.
    pub fn current() -> Kernels {
        Kernels { gpu: Gpu::current(), ..Kernels::default() }
    }

    /// Kernels of a GPU whose launches `run` takes: how the calls of the graph are tested without a GPU.
    pub fn elsewhere(gpu: Gpu, run: impl Fn(&Launch, &[&Array]) -> Result<Vec<Array>> + 'static) -> Kernels {
        Kernels { gpu: Some(gpu), elsewhere: Some(Box::new(run)), ..Kernels::default() }
    }

    /// The GPU; without one nothing has a kernel.
    pub fn gpu(&self) -> Option<Gpu> {
        self.gpu
    }

    /// Runs a launch: lazy, as every operation of MLX. A text that does not compile is an error of the evaluation.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a GPU, [`Error::Shape`] for inputs that do not match the kernel's arguments, [`Error::Mlx`].
    pub fn run(&self, launch: &Launch, inputs: &[&Array]) -> Result<Vec<Array>> {
        let names = launch.source.inputs;
        if inputs.len() != names.len() {
            let expected = format!("{} arrays: {}", names.len(), names.join(", "));
            return Err(Error::Shape { what: "kernel inputs", expected, got: vec![inputs.len()] });
        }
        if let Some(run) = &self.elsewhere {
            return run(launch, inputs);
        }
        let known = self.made.borrow().get(launch.source.name).cloned();
        let kernel = match known {
            Some(kernel) => kernel,
            None => {
                let kernel = make(launch.source, self.gpu)?;
                self.made.borrow_mut().insert(launch.source.name, kernel.clone());
                kernel
            }
        };
        kernel.apply(launch, inputs)
    }
}

impl Gpu {
    /// The GPU that MLX runs on, where this build has kernels for it.
    pub fn current() -> Option<Gpu> {
        let gpu = match (super::METAL && cfg!(target_os = "macos"), cfg!(feature = "cuda")) {
            (true, _) => Gpu::Metal,
            (_, true) => Gpu::Cuda,
            _ => return None,
        };
        crate::engine::mlx::arrays::on_gpu().then_some(gpu)
    }
}

fn make(source: &'static KernelSource, gpu: Option<Gpu>) -> Result<Rc<dyn Backend>> {
    match gpu {
        #[cfg(any(feature = "metal", all(feature = "mlx", target_os = "macos")))]
        Some(Gpu::Metal) => Ok(Rc::new(super::metal::Metal::new(source)?)),
        #[cfg(feature = "cuda")]
        Some(Gpu::Cuda) => Ok(Rc::new(super::cuda::Cuda::new(source)?)),
        _ => Err(Error::Unsupported {
            field: "device",
            value: gpu.map_or("cpu".into(), |gpu| format!("{gpu:?}")),
            reason: format!("this build has no {} kernel for it", source.name),
        }),
    }
}
