//! The text around a body, by MLX's rules written anew: which arguments it declares, in which address space, under which names.
//!
//! An input of fewer than eight elements is in the constant space and one without axes a reference; `_shape`, `_strides` and `_ndim`
//! of an input are declared where the body holds these letters, and thread indices likewise, even inside a longer word.

use super::attention::{ONE, Rules, Side};
use super::bench::{Call, Input, compiler};
use super::wrap::{ATTRIBUTES, Argument, metal};
use std::process::Command;
use turbomoq::internals::engine::mlx::kernels::plan::{self, Around, ElementType, Pass, Turn, Value};
use turbomoq::internals::engine::mlx::kernels::{Form, Gpu, SOURCES, header};
use turbomoq::{CodecSpec, Grid};

/// What MLX 0.32.2 printed for this call (`verbose`, while exporting a function).
#[test]
fn the_rules_are_those_of_mlx() {
    let body = "uint i = thread_position_in_grid.x; out[i] = a[i*a_strides[0]] + b[0] + c + OUT(N) + threadgroups_per_grid.x;";
    let inputs = [
        Argument { name: "a", element: ElementType::F32, axes: 2, count: 16 },
        Argument { name: "b", element: ElementType::F32, axes: 1, count: 3 },
        Argument { name: "c", element: ElementType::I32, axes: 0, count: 1 },
    ];
    let outputs = [Argument { name: "out", element: ElementType::F16, axes: 1, count: 16 }];
    let template = [("N", Value::Int(3)), ("OUT", Value::Type(ElementType::F16))];
    let name = "custom_kernel_k__3_float16_t_float_floatc_int32_ts_float16_t";
    let want = format!(
        "// header\ntemplate <int N, typename OUT>\n[[kernel]] void {name}(\n  const device float* a [[buffer(0)]],\n  \
         const constant int64_t* a_strides [[buffer(1)]],\n  const constant float* b [[buffer(2)]],\n  \
         const constant int32_t& c [[buffer(3)]],\n  device float16_t* out [[buffer(4)]],\n  \
         uint3 thread_position_in_grid [[thread_position_in_grid]],\n  \
         uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {{\n{body}\n}}\n\n\
         template [[host_name(\"{name}\")]] [[kernel]] decltype({name}<3, float16_t>) {name}<3, float16_t>;\n"
    );
    assert_eq!(metal("k", "// header\n", body, &template, &inputs, &outputs), want);
}

/// A call of every kernel, with small and large inputs.
fn calls() -> Vec<Call> {
    let mut calls = vec![];
    for (grid, bits) in [(Grid::Uniform, 4), (Grid::Lloyd, 5), (Grid::Trellis { states: 8 }, 2)] {
        let spec = CodecSpec::new(64, bits, grid);
        let (k, v) = (Side::packed(spec, [1, 2, 9], 1), Side::exact(ElementType::BF16, 64, [1, 2, 9], 2));
        let pass = Pass { heads: 2, group: 2, tokens: 9, ..ONE };
        let case = super::attention::case(&k, &v, &Rules { pass, first: vec![0], cap: 0.0, sparse: 0.0 }, 3);
        let shares: Vec<Vec<u8>> =
            case.call.launch.outputs.iter().map(|o| vec![0; 4 * o.1.iter().product::<usize>()]).collect();
        calls.push(super::attention::merge_call(&case, &shares, ElementType::BF16, true));
        calls.push(super::attention::dequantize_call(&k, [1, 2, 9], ElementType::F16));
        calls.push(case.call);
        calls.push(super::encoding::case(spec, [1, 1, 2], 4, |_| {}).call);
        calls.extend(around(k.form));
    }
    calls
}

/// Calls of what stands around attention, with a frame that has nothing.
fn around(form: Form) -> [Call; 2] {
    let (d, rows) = (form.channels(), Around { rows: [1, 4, 1], group: 2 });
    let turn = Turn { rotation: Some([1; 2]), ..Turn::default() };
    let line = |n: usize| Input::f32(&[n], &vec![1.0; n]);
    let frame = || [line(1), line(1), Input::u32(&[1], &[0])].map(|i| i.strided(&[0, 0, 0]));
    let (launch, place) = plan::enter(form, turn, rows);
    let queries = Input::f16(&[1, 4, 1, d], &vec![0; 4 * d]);
    let mut inputs = vec![queries];
    inputs.extend(frame());
    inputs.extend([line(d), line(1), line(1), Input::i32(&[place.len()], &place)]);
    let enter = Call { launch, inputs };
    let (launch, place) =
        plan::finish(form, turn, rows, [2, 1, 0], (ElementType::F16, false)).expect("few shares");
    let share = |n: usize| [line(4 * n * d), line(8 * n)];
    let mut inputs = [share(2), share(1), [line(1), line(1)]].concat();
    inputs.push(line(1));
    inputs.extend(frame());
    inputs.extend([line(d), line(1), Input::i32(&[place.len()], &place)]);
    [enter, Call { launch, inputs }]
}

fn arguments(call: &Call) -> (Vec<Argument>, Vec<Argument>) {
    let source = call.launch.source;
    let inputs = source.inputs.iter().zip(&call.inputs).map(|(name, i)| Argument {
        name,
        element: i.element,
        axes: i.strides.len(),
        count: i.count,
    });
    let outputs = source.outputs.iter().zip(&call.launch.outputs).map(|(name, (element, shape))| Argument {
        name,
        element: *element,
        axes: shape.len(),
        count: shape.iter().product(),
    });
    (inputs.collect(), outputs.collect())
}

/// The words of a text: letters, digits and underscores.
fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// These are words of Metal, which no name may be. And a pointer with an address space of its own would not take an input that is small
/// enough for the other one.
fn no_address_space(name: &str, code: &str) {
    for space in ["device", "constant", "threadgroup", "thread", "kernel", "vertex", "fragment"] {
        assert!(!identifiers(code).any(|w| w == space), "{name}: the word {space}");
    }
}

#[test]
fn arguments_are_declared_where_they_are_meant_and_nowhere_else() {
    for source in SOURCES {
        // Comments count for MLX's search as much as code, so the mentions are looked for in both.
        let words: Vec<&str> = identifiers(source.body).collect();
        let code: String = source.body.lines().flat_map(|l| [l.split("//").next().unwrap(), "\n"]).collect();
        for name in source.inputs {
            for suffix in ["_shape", "_strides", "_ndim"] {
                let meant = words.contains(&format!("{name}{suffix}").as_str());
                let found = source.body.contains(&format!("{name}{suffix}"));
                assert_eq!(meant, found, "{}: {name}{suffix} is part of a longer word", source.name);
            }
            let scalar = code.contains(&format!("TM_SCALAR({name})"));
            let uses = identifiers(&code).filter(|w| w == name).count();
            assert!(uses > 0, "{}: {name} is not used", source.name);
            assert!(!scalar || uses == 1, "{}: {name} has no axes and is used as if it had", source.name);
        }
        for (attribute, _) in ATTRIBUTES {
            assert_eq!(
                words.contains(&attribute),
                source.body.contains(attribute),
                "{}: {attribute} is part of a longer word",
                source.name
            );
        }
        no_address_space(source.name, &code);
    }
    let header = header(None);
    let common = &header[header.find("// What the kernels share").expect("common.h")..];
    no_address_space(
        "common",
        &common.lines().flat_map(|l| [l.split("//").next().unwrap(), "\n"]).collect::<String>(),
    );
    for call in calls() {
        let (inputs, _) = arguments(&call);
        for i in inputs {
            let scalar = call.launch.source.body.contains(&format!("TM_SCALAR({})", i.name));
            assert_eq!(scalar, i.axes == 0, "{}: axes of {}", call.launch.source.name, i.name);
        }
    }
}

/// Names of Metal and CUDA as plain C++, so that the compiler at hand reads the whole text of every kernel. Address spaces and
/// attributes are empty words here: that they fit is what the test above is for.
const METAL: &str = "#include <algorithm>\n#include <cmath>\n#include <cstdint>\nusing uint = unsigned; using ushort = unsigned short;\n\
    struct uint3 { uint x, y, z; };\n\
    struct half { unsigned short bits; half() = default; template <typename T> explicit half(T); operator float() const; };\n\
    typedef half float16_t; struct bfloat16_t : half { using half::half; };\n\
    #define device\n#define constant\n#define threadgroup static\n\
    template <typename T, typename U> T as_type(U x) { static_assert(sizeof(T) == sizeof(U), \"a cast of bits\"); T y; __builtin_memcpy(&y, &x, sizeof(T)); return y; }\n\
    namespace metal { enum class mem_flags { mem_threadgroup }; namespace fast { inline float exp(float x) { return std::exp(x); } }\n\
    using std::exp2; using std::floor; using std::fmax; using std::min; using std::log2; using std::rint; using std::sqrt; using std::tanh;\n\
    template <typename T> T simd_sum(T); template <typename T> T simd_max(T); template <typename T> T simd_min(T);\n\
    template <typename T> T simd_or(T); template <typename T> T simd_shuffle(T, ushort); template <typename T> T simd_shuffle_xor(T, ushort); }\n\
    void threadgroup_barrier(metal::mem_flags);\n";

const CUDA: &str = "#include <cmath>\n#include <cstdint>\n#define device\n#define constant\n#define __device__\n#define __forceinline__ inline\n#define __shared__ static\n\
    struct Three { unsigned x, y, z; }; extern Three threadIdx, blockIdx, blockDim, gridDim;\n\
    struct __half { unsigned short bits; __half() = default; template <typename T> explicit __half(T); operator float() const; };\n\
    typedef __half float16_t; struct bfloat16_t : __half { using __half::__half; };\n\
    void __syncthreads(); float __int_as_float(int); float __uint_as_float(unsigned); unsigned __float_as_uint(float);\n\
    unsigned short __half_as_ushort(__half); __half __ushort_as_half(unsigned short); inline float __expf(float x) { return std::exp(x); }\n\
    inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }\n\
    template <typename T> T __shfl_xor_sync(unsigned, T, int); template <typename T> T __shfl_sync(unsigned, T, int);\n\
    unsigned __funnelshift_r(unsigned, unsigned, unsigned); using std::fmaxf; unsigned __ballot_sync(unsigned, bool);\n";

#[test]
fn every_dialect_is_read_by_a_compiler() {
    let Some((name, _)) = compiler() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut texts = vec![];
    for (gpu, stub) in [(Gpu::Metal, METAL), (Gpu::Cuda, CUDA)] {
        let mut text = stub.to_string();
        // The system's headers of the dialect are what the stub stands for.
        text.extend(header(Some(gpu)).lines().filter(|l| !l.starts_with("#include")).flat_map(|l| [l, "\n"]));
        for (n, call) in calls().iter().enumerate() {
            let (inputs, outputs) = arguments(call);
            let source = call.launch.source;
            let key = format!("{}_{n}", source.key(gpu));
            let mut whole = metal(&key, "", source.body, &call.launch.template, &inputs, &outputs);
            if gpu == Gpu::Cuda {
                // MLX declares pointers only, and no indices.
                whole = whole.replace(" int32_t& ", " int32_t* ");
                for (attribute, kind) in ATTRIBUTES {
                    for end in [",\n", ") {"] {
                        let other = if end == ") {" { ") {" } else { "" };
                        whole = whole.replace(&format!(",\n  {kind} {attribute} [[{attribute}]]) {{"), ") {");
                        whole = whole.replace(&format!("  {kind} {attribute} [[{attribute}]]{end}"), other);
                    }
                }
            }
            // Attributes mean nothing to a C++ compiler and their places are not those of C++.
            while let Some(at) = whole.find("[[") {
                let end = whole[at..].find("]]").unwrap() + at + 2;
                whole.replace_range(at..end, "");
            }
            text += &whole;
        }
        texts.push((gpu, text));
    }
    for (device, text) in texts {
        let path = folder.path().join("text.cpp");
        std::fs::write(&path, text).unwrap();
        let flags = [
            "-std=c++17",
            "-fsyntax-only",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-Wno-unused",
            "-Wno-undefined-inline",
        ];
        let read = Command::new(name).args(flags).arg(&path).output().unwrap();
        let message = String::from_utf8_lossy(&read.stderr);
        assert!(read.status.success(), "{device:?}:\n{}", message.chars().take(4000).collect::<String>());
    }
}
