//! Builds the kernel texts with the system's C++ compiler and runs launches on the host machine of `prelude_host.h`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use turbomoq::internals::engine::mlx::kernels::plan::{ElementType, Launch, Value};
use turbomoq::internals::engine::mlx::kernels::{KernelSource, header};

/// An input with any strides over its storage.
#[derive(Clone)]
pub struct Input {
    pub element: ElementType,
    pub strides: Vec<i64>,
    /// Elements of the storage.
    pub count: usize,
    pub bytes: Vec<u8>,
}

impl Input {
    pub fn new(element: ElementType, shape: &[usize], bytes: Vec<u8>) -> Input {
        let mut strides = vec![1i64; shape.len()];
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i] * shape[i] as i64;
        }
        Input { element, strides, count: shape.iter().product(), bytes }
    }

    pub fn f32(shape: &[usize], data: &[f32]) -> Input {
        Input::new(ElementType::F32, shape, data.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn i32(shape: &[usize], data: &[i32]) -> Input {
        Input::new(ElementType::I32, shape, data.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn u32(shape: &[usize], data: &[u32]) -> Input {
        Input::new(ElementType::U32, shape, data.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn f16(shape: &[usize], bits: &[u16]) -> Input {
        Input::new(ElementType::F16, shape, bits.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn bf16(shape: &[usize], bits: &[u16]) -> Input {
        Input::new(ElementType::BF16, shape, bits.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn u8(shape: &[usize], data: &[u8]) -> Input {
        Input::new(ElementType::U8, shape, data.to_vec())
    }

    /// The same storage read with other strides.
    pub fn strided(mut self, strides: &[usize]) -> Input {
        self.strides = strides.iter().map(|&s| s as i64).collect();
        self
    }
}

/// A launch with its inputs.
#[derive(Clone)]
pub struct Call {
    pub launch: Launch,
    pub inputs: Vec<Input>,
}

fn type_name(element: ElementType) -> &'static str {
    match element {
        ElementType::F32 => "float",
        ElementType::F16 => "tm_half",
        ElementType::BF16 => "host::Bfloat",
        ElementType::U32 => "uint",
        ElementType::U8 => "uint8_t",
        ElementType::I32 => "int",
    }
}

impl Call {
    /// Template arguments: the values of the launch, then the types of inputs and outputs.
    fn arguments(&self) -> String {
        let values = self.launch.template.iter().map(|(_, v)| match v {
            Value::Int(n) => n.to_string(),
            Value::Type(e) => type_name(*e).into(),
        });
        let types = self.inputs.iter().map(|i| i.element).chain(self.launch.outputs.iter().map(|o| o.0));
        values.chain(types.map(|e| type_name(e).to_string())).collect::<Vec<_>>().join(", ")
    }

    pub fn key(&self) -> String {
        format!("tm_{}<{}>", self.launch.source.name, self.arguments())
    }

    fn write(&self, out: &mut Vec<u8>) {
        let mut number = |n: usize| out.extend((n as u32).to_le_bytes());
        number(self.key().len());
        out.extend(self.key().bytes());
        for n in self.launch.grid.into_iter().chain(self.launch.group) {
            out.extend((n as u32).to_le_bytes());
        }
        out.extend((self.inputs.len() as u32).to_le_bytes());
        for input in &self.inputs {
            out.extend((input.strides.len() as u32).to_le_bytes());
            input.strides.iter().for_each(|s| out.extend(s.to_le_bytes()));
            out.extend((input.count as u64).to_le_bytes());
            out.extend((input.bytes.len() as u64).to_le_bytes());
            out.extend(&input.bytes);
        }
        out.extend((self.launch.outputs.len() as u32).to_le_bytes());
        for (_, shape) in &self.launch.outputs {
            out.extend((shape.iter().product::<usize>() as u64).to_le_bytes());
        }
    }
}

/// The function around a body, with the arguments that MLX would declare.
fn function(source: &KernelSource, body: &str, call: &Call) -> String {
    let mut text = String::new();
    let values = call.launch.template.iter().map(|(name, v)| match v {
        Value::Int(_) => format!("int {name}"),
        Value::Type(_) => format!("typename {name}"),
    });
    let inputs = (0..source.inputs.len()).map(|i| format!("typename In{i}"));
    let outputs = (0..source.outputs.len()).map(|i| format!("typename Out{i}"));
    let list: Vec<String> = values.chain(inputs).chain(outputs).collect();
    let _ = writeln!(text, "template <{}>\nvoid tm_{}(Call& call) {{", list.join(", "), source.name);
    for (i, name) in source.inputs.iter().enumerate() {
        let _ = writeln!(text, "  const host::In<In{i}> {name} = call.in<In{i}>({i}, \"{name}\");");
        if body.contains(&format!("{name}_strides")) {
            let _ = writeln!(
                text,
                "  const host::In<int64_t> {name}_strides = call.strides({i}, \"{name}_strides\");"
            );
        }
    }
    for (i, name) in source.outputs.iter().enumerate() {
        let _ = writeln!(text, "  const host::Out<Out{i}> {name} = call.out<Out{i}>({i}, \"{name}\");");
    }
    let _ = writeln!(text, "  host::Machine::get().run(call.grid, call.group, [&]() {{\n{body}\n  }});\n}}");
    text
}

/// The compiler and the checks that it knows; `None` where there is no compiler at all.
pub fn compiler() -> Option<&'static (String, Vec<&'static str>)> {
    static FOUND: OnceLock<Option<(String, Vec<&'static str>)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (source, program) = (folder.path().join("probe.cpp"), folder.path().join("probe"));
        std::fs::write(&source, "int main() { return 0; }\n").expect("write");
        let works = |name: &str, flags: &[&str]| {
            let built = Command::new(name)
                .args(["-std=c++17"])
                .args(flags)
                .arg(&source)
                .arg("-o")
                .arg(&program)
                .output();
            built.is_ok_and(|o| o.status.success())
                && Command::new(&program).status().is_ok_and(|s| s.success())
        };
        let named = std::env::var("CXX").ok();
        let names = named.iter().map(String::as_str).chain(["c++", "g++", "clang++"]);
        let name = names.into_iter().find(|name| works(name, &[]))?.to_string();
        let mut flags = vec![];
        for flag in [
            &["-fsanitize=bounds,shift,signed-integer-overflow", "-fno-sanitize-recover=all"][..],
            &["-ftrivial-auto-var-init=pattern"][..],
        ] {
            if works(&name, flag) {
                flags.extend(flag);
            }
        }
        Some((name, flags))
    });
    if found.is_none() {
        println!("no C++ compiler: the kernel texts were not run");
    }
    found.as_ref()
}

/// A program with every instance that some calls need.
pub struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    /// Compiles the texts as they are; `None` where there is no compiler.
    pub fn new(calls: &[Call]) -> Option<Bench> {
        Bench::build(calls, |_, text| text, &["-Werror"])
    }

    /// Compiles texts changed by `edit`, which is given "common" or the name of a kernel with the text.
    pub fn with(calls: &[Call], edit: impl Fn(&str, String) -> String) -> Option<Bench> {
        Bench::build(calls, edit, &[])
    }

    fn build(calls: &[Call], edit: impl Fn(&str, String) -> String, more: &[&str]) -> Option<Bench> {
        let (name, flags) = compiler()?;
        let mut text = edit("common", header(None));
        text += include_str!("host.cpp");
        let mut functions: Vec<&str> = vec![];
        let mut keys: Vec<String> = vec![];
        for call in calls {
            let source = call.launch.source;
            if !functions.contains(&source.name) {
                functions.push(source.name);
                text += &function(source, &edit(source.name, source.body.into()), call);
            }
            if !keys.contains(&call.key()) {
                keys.push(call.key());
            }
        }
        text += "std::vector<std::pair<std::string, Kernel>> kernels() {\n  return {\n";
        for key in &keys {
            let _ = writeln!(text, "      {{\"{key}\", &{key}}},");
        }
        text += "  };\n}\n";
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path: PathBuf = folder.path().join("bench.cpp");
        std::fs::write(&path, text).expect("write");
        let mut command = Command::new(name);
        // Without optimisation: the time goes into compiling many instances, not into running them.
        command
            .args(["-std=c++17", "-O0", "-Wall", "-Wextra", "-Wno-unknown-pragmas"])
            .args(more)
            .args(flags);
        let built = command.arg(&path).arg("-o").arg(folder.path().join("bench")).output().expect("compiler");
        if !built.status.success() {
            let message = String::from_utf8_lossy(&built.stderr).into_owned();
            panic!("the kernel texts do not compile:\n{}", message.chars().take(6000).collect::<String>());
        }
        Some(Bench { folder })
    }

    /// Outputs of every call as bytes, or what the machine found wrong.
    pub fn run(&self, calls: &[Call]) -> Result<Vec<Vec<Vec<u8>>>, String> {
        let (input, output) = (self.folder.path().join("calls"), self.folder.path().join("results"));
        let mut bytes = (calls.len() as u32).to_le_bytes().to_vec();
        calls.iter().for_each(|c| c.write(&mut bytes));
        std::fs::write(&input, bytes).expect("write");
        let run =
            Command::new(self.folder.path().join("bench")).arg(&input).arg(&output).output().expect("bench");
        if !run.status.success() {
            return Err(format!("{}: {}", run.status, String::from_utf8_lossy(&run.stderr)));
        }
        let results = std::fs::read(&output).expect("results");
        let mut rest = &results[..];
        let mut take = |n: usize| {
            let (part, after) = rest.split_at(n);
            rest = after;
            part.to_vec()
        };
        let size = |e: ElementType| match e {
            ElementType::F32 | ElementType::U32 | ElementType::I32 => 4,
            ElementType::F16 | ElementType::BF16 => 2,
            ElementType::U8 => 1,
        };
        let outputs = |c: &Call| {
            c.launch.outputs.iter().map(|(e, s)| s.iter().product::<usize>() * size(*e)).collect::<Vec<_>>()
        };
        let all = calls.iter().map(|c| outputs(c).into_iter().map(&mut take).collect()).collect();
        Ok(all)
    }
}

/// Apple's headers call the functions that fibres are made with deprecated; here declarations of our own do.
#[test]
fn the_bench_has_no_warning_where_contexts_are_deprecated() {
    let Some((name, _)) = compiler() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("bench.cpp");
    let deprecated = "#ifdef __APPLE__\n#define _XOPEN_SOURCE 700\n#define _DARWIN_C_SOURCE\n#endif\n#include <ucontext.h>\n\
        extern \"C\" {\n\
        [[deprecated]] int getcontext(ucontext_t*);\n\
        [[deprecated]] int setcontext(const ucontext_t*);\n\
        [[deprecated]] void makecontext(ucontext_t*, void (*)(), int, ...);\n}\n";
    let compile = |rest: &str| {
        std::fs::write(&path, format!("{deprecated}{rest}")).expect("write");
        let flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"];
        Command::new(name).args(flags).arg(&path).output().expect("compiler")
    };
    let unguarded = compile("void f(ucontext_t* c) { getcontext(c); }\n");
    assert!(!unguarded.status.success(), "the declarations above make a call a warning");
    let bench = compile(&header(None));
    assert!(bench.status.success(), "{}", String::from_utf8_lossy(&bench.stderr));
}

/// f32 elements of an output.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// u32 elements of an output.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// 16-bit elements of an output.
pub fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect()
}
