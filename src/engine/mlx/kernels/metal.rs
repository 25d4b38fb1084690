//! Kernels through mlx-rs's Metal kernels.

use super::backend::{Backend, dtype};
use super::plan::{Launch, Value};
use super::{Gpu, KernelSource, header};
use crate::error::Result;
use mlx_rs::Array;
use mlx_rs::fast::{
    MetalKernel, MetalKernelApplyOptions, MetalKernelOptions, MetalKernelOutput, TemplateArg,
};

/// A Metal kernel.
pub(super) struct Metal(MetalKernel);

impl Metal {
    pub(super) fn new(source: &KernelSource) -> Result<Metal> {
        // The texts follow strides, so whole-capacity buffers and views of them go in without a copy.
        let options = MetalKernelOptions {
            header: header(Some(Gpu::Metal)),
            ensure_row_contiguous: false,
            atomic_outputs: false,
        };
        let key = source.key(Gpu::Metal);
        Ok(Metal(MetalKernel::new(&key, source.inputs, source.outputs, source.body, options)?))
    }
}

impl Backend for Metal {
    fn apply(&self, launch: &Launch, inputs: &[&Array]) -> Result<Vec<Array>> {
        let template = launch.template.iter().map(|(name, value)| {
            let value = match value {
                Value::Int(n) => TemplateArg::Int(*n),
                Value::Type(element) => TemplateArg::Dtype(dtype(*element)),
            };
            (name.to_string(), value)
        });
        let outputs: Vec<MetalKernelOutput> = launch
            .outputs
            .iter()
            .map(|(element, shape)| MetalKernelOutput {
                shape: shape.iter().map(|&n| n as i32).collect(),
                dtype: dtype(*element),
            })
            .collect();
        let three = |[x, y, z]: [usize; 3]| (x as i32, y as i32, z as i32);
        let options = MetalKernelApplyOptions { template_args: template.collect(), ..Default::default() };
        // SAFETY: the launch was planned for these inputs: the text reads inside them by their own strides and lengths, writes
        // every element of its outputs once and no input, and orders accesses of threads by barriers. The host bench in
        // tests/kernels checks each of these for launches of every plan.
        let out =
            unsafe { self.0.apply(inputs, &outputs, three(launch.grid), three(launch.group), options)? };
        Ok(out)
    }
}
