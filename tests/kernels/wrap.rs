//! The text that MLX makes of a body, by its rules written anew: which arguments it declares, in which address space, under which
//! names.
//!
//! `_shape`, `_strides` and `_ndim` of an input are declared where the body holds these letters. On Metal an input of fewer than
//! eight elements is in the constant space, one without axes is a reference, and thread indices are declared where they are named;
//! on CUDA all inputs are pointers, and strides are passed by value.

use std::fmt::Write as _;
use turbomoq::internals::engine::mlx::kernels::plan::{ElementType, Value};

/// Thread indices that MLX declares when a body names them.
pub const ATTRIBUTES: [(&str, &str); 20] = [
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
];

/// An argument as MLX sees it.
pub struct Argument {
    pub name: &'static str,
    pub element: ElementType,
    pub axes: usize,
    pub count: usize,
}

pub fn metal_type(element: ElementType) -> &'static str {
    match element {
        ElementType::F32 => "float",
        ElementType::F16 => "float16_t",
        ElementType::BF16 => "bfloat16_t",
        ElementType::U32 => "uint32_t",
        ElementType::U8 => "uint8_t",
        ElementType::I32 => "int32_t",
    }
}

/// The Metal text of a call, its instance at the end.
pub fn metal(
    name: &str,
    header: &str,
    body: &str,
    template: &[(&str, Value)],
    inputs: &[Argument],
    outputs: &[Argument],
) -> String {
    let value = |v: &Value| match v {
        Value::Int(n) => n.to_string(),
        Value::Type(e) => metal_type(*e).to_string(),
    };
    let values: Vec<String> = template.iter().map(|(_, v)| value(v)).collect();
    let kinds: Vec<String> = template
        .iter()
        .map(|(n, v)| format!("{} {n}", if matches!(v, Value::Int(_)) { "int" } else { "typename" }))
        .collect();
    let mut kernel = format!("custom_kernel_{name}__{}", values.join("_"));
    for i in inputs {
        let space = if i.axes == 0 {
            "s"
        } else if i.count < 8 {
            "c"
        } else {
            ""
        };
        kernel += &format!("_{}{space}", metal_type(i.element));
    }
    outputs.iter().for_each(|o| kernel += &format!("_{}", metal_type(o.element)));
    let mut lines: Vec<String> = vec![];
    let mut buffer = 0;
    let mut declare = |text: String, lines: &mut Vec<String>| {
        lines.push(format!("  {text} [[buffer({buffer})]]"));
        buffer += 1;
    };
    for i in inputs {
        let space = if i.count < 8 { "constant" } else { "device" };
        let mark = if i.axes == 0 { "&" } else { "*" };
        declare(format!("const {space} {}{mark} {}", metal_type(i.element), i.name), &mut lines);
        for (suffix, kind) in [("_shape", "int*"), ("_strides", "int64_t*"), ("_ndim", "int&")] {
            let word = format!("{}{suffix}", i.name);
            if i.axes > 0 && body.contains(&word) {
                declare(format!("const constant {kind} {word}"), &mut lines);
            }
        }
    }
    for o in outputs {
        declare(format!("device {}* {}", metal_type(o.element), o.name), &mut lines);
    }
    let used = ATTRIBUTES.iter().filter(|(a, _)| body.contains(a));
    lines.extend(used.map(|(a, kind)| format!("  {kind} {a} [[{a}]]")));
    let instance = format!("{kernel}<{}>", values.join(", "));
    format!(
        "{header}template <{}>\n[[kernel]] void {kernel}(\n{}) {{\n{body}\n}}\n\ntemplate [[host_name(\"{kernel}\")]] [[kernel]] decltype({instance}) {instance};\n",
        kinds.join(", "),
        lines.join(",\n")
    )
}

/// The CUDA text of a call.
#[allow(dead_code)] // The tests have no compiler for it; `examples/kernel_texts.rs` writes it for one that has.
pub fn cuda(
    name: &str,
    header: &str,
    body: &str,
    template: &[(&str, Value)],
    inputs: &[Argument],
    outputs: &[Argument],
) -> String {
    let kind = |element: ElementType| match element {
        ElementType::F32 => "float",
        ElementType::F16 => "__half",
        ElementType::BF16 => "__nv_bfloat16",
        ElementType::U32 => "uint32_t",
        ElementType::U8 => "uint8_t",
        ElementType::I32 => "int32_t",
    };
    let mut arguments = vec![];
    for i in inputs {
        arguments.push(format!("const {}* {}", kind(i.element), i.name));
        for (suffix, type_name) in [("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")] {
            let word = format!("{}{suffix}", i.name);
            if i.axes > 0 && body.contains(&word) {
                arguments.push(format!("const __grid_constant__ {type_name} {word}"));
            }
        }
    }
    arguments.extend(outputs.iter().map(|o| format!("{}* {}", kind(o.element), o.name)));
    let mut text = String::from(
        "#include \"mlx/backend/cuda/device/utils.cuh\"\n\n#include <cooperative_groups.h>\n\n\
         #define inf cuda::std::numeric_limits<float>::infinity()\n\n",
    );
    let _ = write!(text, "{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n");
    let _ = writeln!(text, "__global__ void {name}(\n    {}) {{", arguments.join(",\n    "));
    for (key, value) in template {
        let _ = match value {
            Value::Int(n) => writeln!(text, "  constexpr int {key} = {n};"),
            Value::Type(e) => writeln!(text, "  using {key} = {};", kind(*e)),
        };
    }
    let _ = write!(text, "\n{body}\n}}\n\n}} // namespace mlx::core::cu\n");
    text
}
