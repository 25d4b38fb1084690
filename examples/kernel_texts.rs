//! Writes the kernel texts as MLX would compile them, for compilers that need no GPU (`.ci/kernels/run`): a folder of texts and a list
//! of what each is and how it is launched. `cargo run --release --example kernel_texts -- FOLDER`

#[path = "../tests/kernels/wrap.rs"]
mod wrap;

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use turbomoq::internals::engine::mlx::kernels::plan::{self, Around, ElementType, Launch, Pass, Turn};
use turbomoq::internals::engine::mlx::kernels::{Form, Gpu, Kind, header};
use turbomoq::{ScaleFormat, ScaleRule};
use wrap::Argument;

/// A launch with the element types of its inputs, and how many elements of each small one there are.
struct Text {
    what: String,
    launch: Launch,
    inputs: Vec<Argument>,
}

/// Elements of an input that is larger than any constant buffer of MLX.
const MANY: usize = 1000;

fn form(kind: Kind, bits: u8, dim: usize) -> Form {
    Form { kind, bits: if kind == Kind::Exact { 16 } else { bits }, dim, second: None }
}

/// The same with half of the channels in a second band of other bits.
fn halves(kind: Kind, bits: u8, bits2: u8, dim: usize) -> Form {
    Form { second: Some((bits2, dim / 2)), ..form(kind, bits, dim / 2) }
}

fn table_size(form: Form) -> usize {
    let of = |bits: u8| match form.kind {
        Kind::Exact | Kind::Uniform => 1,
        Kind::Mirrored => 1 << (bits - 1),
        Kind::Table => 1 << bits,
        Kind::Trellis8 => 128,
        Kind::Trellis10 => 512,
    };
    of(form.bits) + form.second.map_or(0, |(bits, _)| of(bits))
}

fn name(form: Form) -> String {
    let kind = format!("{:?}", form.kind).to_lowercase();
    let second = form.second.map_or(String::new(), |(bits, dim)| format!(" + {bits} bits d {dim}"));
    format!("{kind} {} bits d {}{second}", form.bits, form.dim)
}

/// The types of words and scales of a side.
#[derive(Clone, Copy)]
struct Types(ElementType, ElementType);

fn types(form: Form, exact: ElementType, scale: ElementType) -> Types {
    Types(if form.kind == Kind::Exact { exact } else { ElementType::U32 }, scale)
}

fn attend(k: Form, v: Form, pass: &Pass, [kt, vt]: [Types; 2], small: bool) -> Option<Text> {
    let (launch, place) = plan::attend(k, v, pass)?;
    let rows = if small { 4 } else { MANY };
    let input = |name, element, axes, count| Argument { name, element, axes, count };
    let inputs = vec![
        input("queries", ElementType::F32, 4, MANY),
        input("k_words", kt.0, 4, rows),
        input("k_scales", kt.1, 4, rows),
        input("k_levels", ElementType::F32, 1, table_size(k)),
        input("v_words", vt.0, 4, rows),
        input("v_scales", vt.1, 4, rows),
        input("v_levels", ElementType::F32, 1, table_size(v)),
        input("bias", ElementType::F32, 4, rows),
        input("mask", ElementType::F32, 4, if pass.masked { MANY } else { 1 }),
        input("first", ElementType::I32, 1, pass.batch),
        input("tokens", ElementType::I32, 0, 1),
        input("limits", ElementType::F32, 1, 2),
        input("place", ElementType::I32, 1, place.len()),
    ];
    let what = format!("attend {} / {} gqa {}", name(k), name(v), pass.group);
    Some(Text { what, launch, inputs })
}

fn merge(dim: usize, out: ElementType, parts: usize) -> Text {
    let (launch, counts) = plan::merge([1, 8, 1], parts, dim, out, false, true);
    let input = |name, count| Argument { name, element: ElementType::F32, axes: 1, count };
    let inputs = vec![
        input("sums", MANY),
        input("state", 2 * parts),
        input("sinks", parts),
        Argument { name: "counts", element: ElementType::I32, axes: 1, count: counts.len() },
    ];
    Text { what: format!("merge d {dim} {out:?}"), launch, inputs }
}

fn dequantize(form: Form, scale: ElementType, out: ElementType, small: bool) -> Text {
    let launch = plan::dequantize(form, [1, 2, 9], out);
    let rows = if small { 4 } else { MANY };
    let inputs = vec![
        Argument { name: "words", element: ElementType::U32, axes: 4, count: rows },
        Argument { name: "scales", element: scale, axes: 4, count: rows },
        Argument { name: "levels", element: ElementType::F32, axes: 1, count: table_size(form) },
        Argument { name: "tokens", element: ElementType::I32, axes: 0, count: 1 },
    ];
    Text { what: format!("dequantize {}", name(form)), launch, inputs }
}

fn encode(form: Form, order: usize, format: ScaleFormat) -> Text {
    let (launch, place) = plan::encode(form, order, true, ScaleRule::Unbiased, format, [1, 2, 9]);
    let input = |name, count| Argument { name, element: ElementType::F32, axes: 1, count };
    let mut inputs = vec![
        Argument { name: "vectors", element: ElementType::F32, axes: 4, count: MANY },
        input("signs", form.dim),
        input("factor", order * order),
        input("levels", if table_size(form) >= 128 { 2 * table_size(form) } else { 1 << form.bits }),
    ];
    if launch.source.inputs.contains(&"borders") {
        inputs.push(input("borders", (1 << form.bits) - 1));
    }
    inputs.push(Argument { name: "place", element: ElementType::I32, axes: 1, count: place.len() });
    Text { what: format!("encode {}", name(form)), launch, inputs }
}

/// What stands around attention on rows of this form.
fn around(form: Form, orders: [usize; 2], query: ElementType, out: ElementType) -> Vec<Text> {
    let rows = Around { rows: [1, 32, 1], group: 4 };
    let turn = Turn { rotation: Some(orders), ..Turn::default() };
    let input = |name, element, axes, count| Argument { name, element, axes, count };
    let f32s = |name, count| input(name, ElementType::F32, 1, count);
    let frame = [
        input("centre", ElementType::F32, 3, MANY),
        input("gain", ElementType::F32, 3, 1),
        input("order", ElementType::U32, 3, MANY),
    ];
    let factor: usize = orders.iter().map(|n| n * n).sum();
    let (launch, place) = plan::enter(form, turn, rows);
    let mut inputs = vec![input("queries", query, 4, MANY)];
    inputs.extend(frame);
    inputs.extend([f32s("signs", form.channels()), f32s("factor", factor), f32s("scale", 1)]);
    inputs.push(input("place", ElementType::I32, 1, place.len()));
    let mut out_texts = vec![Text { what: format!("enter {}", name(form)), launch, inputs }];
    if let Some((launch, place)) = plan::finish(form, turn, rows, [64, 1, 2], (out, true)) {
        let shares = ["sums", "state", "sums1", "state1", "sums2", "state2"];
        let mut inputs: Vec<Argument> = shares.iter().map(|name| f32s(name, MANY)).collect();
        inputs.push(f32s("sinks", 32));
        inputs.extend([
            input("centre", ElementType::F32, 3, 1),
            input("gain", ElementType::F32, 3, MANY),
            input("order", ElementType::U32, 3, 1),
        ]);
        inputs.extend([f32s("signs", form.channels()), f32s("factor", factor)]);
        inputs.push(input("place", ElementType::I32, 1, place.len()));
        out_texts.push(Text { what: format!("finish {}", name(form)), launch, inputs });
    }
    out_texts
}

const PASS: Pass = Pass {
    batch: 1,
    heads: 8,
    group: 4,
    queries: 1,
    tokens: 8192,
    position: 8191,
    window: 0,
    causal: true,
    masked: false,
};

/// The kinds of rows with the widths that they are made in.
fn kinds() -> Vec<(Kind, u8)> {
    let mut kinds = vec![(Kind::Exact, 16)];
    kinds.extend((1..=8).map(|bits| (Kind::Uniform, bits)));
    kinds.extend((1..=8).map(|bits| (Kind::Mirrored, bits)));
    kinds.extend([3, 5].map(|bits| (Kind::Table, bits)));
    kinds.extend((1..=4).map(|bits| (Kind::Trellis8, bits)));
    kinds.extend((1..=4).map(|bits| (Kind::Trellis10, bits)));
    kinds
}

/// The forms whose loops have a ceiling: what decode mostly runs.
fn ruled() -> Vec<Text> {
    let mut texts = vec![];
    let half = ElementType::F16;
    let all = [
        (Kind::Uniform, 4),
        (Kind::Trellis8, 3),
        (Kind::Mirrored, 4),
        (Kind::Trellis8, 4),
        (Kind::Exact, 16),
    ];
    for (group, kinds) in [(4, &all[..]), (1, &all[..2]), (8, &all[..2])] {
        for &(kind, bits) in kinds {
            let f = form(kind, bits, 128);
            let t = types(f, half, half);
            texts.extend(attend(f, f, &Pass { group, ..PASS }, [t, t], false));
        }
    }
    // Keys of `best@3` and its values of 3 bits.
    let (keys, values) = (halves(Kind::Trellis8, 4, 2, 128), form(Kind::Trellis8, 3, 128));
    let t = types(values, half, half);
    texts.extend(attend(keys, values, &PASS, [t, t], false));
    texts
}

/// A cover: each kind meets dims, query heads and types by turns.
fn cover(texts: usize) -> Vec<Text> {
    let kinds = kinds();
    let dims = [128, 64, 80, 96, 112, 256, 192, 32];
    let groups = [4, 8, 1, 2, 6, 7, 5, 3, 16];
    let mut out = vec![];
    for i in 0..texts {
        let (kk, kb) = kinds[i % kinds.len()];
        let (vk, vb) = kinds[(i * 7 + i / kinds.len()) % kinds.len()];
        let dim = dims[(i + i / 8) % 8];
        let (mut k, v) = (form(kk, kb, dim), form(vk, vb, if i % 9 == 8 { dims[(i + 3) % 8] } else { dim }));
        if i % 6 == 5 && kk != Kind::Exact {
            k = halves(kk, kb, 1 + kb % 4, dim);
        }
        let exact = [ElementType::F16, ElementType::BF16, ElementType::F32][i % 3];
        let scale = [ElementType::F16, ElementType::U8][i / 2 % 2];
        let pass =
            Pass { batch: 1 + i % 12, group: groups[i % 9], queries: 1 + i % 16, masked: i % 4 == 1, ..PASS };
        out.extend(attend(k, v, &pass, [types(k, exact, scale), types(v, exact, scale)], i % 5 == 4));
    }
    out
}

/// The other kernels.
fn others() -> Vec<Text> {
    let mut out = vec![];
    for (i, (kind, bits)) in kinds().into_iter().enumerate() {
        let dim = [128, 64, 80, 256][i % 4];
        let f = form(kind, bits, dim);
        let (scale, format) = if i % 2 == 0 {
            (ElementType::F16, ScaleFormat::F16)
        } else {
            (ElementType::U8, ScaleFormat::Wide8)
        };
        let to = [ElementType::F32, ElementType::F16, ElementType::BF16][i % 3];
        if i < 8 {
            out.push(merge(dim, to, if i % 2 == 0 { 3 } else { 64 }));
        }
        if kind != Kind::Exact {
            out.push(dequantize(f, scale, to, i % 5 == 0));
            out.push(encode(f, if dim == 80 { 20 } else { 1 }, format));
        }
    }
    out
}

/// Multi-head latent attention: 16 query heads on one row of 576 and 512 channels.
fn latent() -> Vec<Text> {
    let t = Types(ElementType::U32, ElementType::F16);
    let (k, v) = (form(Kind::Uniform, 4, 512), form(Kind::Uniform, 4, 512));
    attend(k, v, &Pass { heads: 1, group: 16, ..PASS }, [t, t], false).into_iter().collect()
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn write(folder: &Path, gpu: Gpu, texts: &[Text]) -> Result<(), Box<dyn Error>> {
    let (folder, end) = match gpu {
        Gpu::Cuda => (folder.join("cuda"), "cu"),
        _ => (folder.join("metal"), "metal"),
    };
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("header.h"), header(Some(gpu)))?;
    let mut list = String::from("[\n");
    for (n, text) in texts.iter().enumerate() {
        let source = text.launch.source;
        let outputs: Vec<Argument> = source
            .outputs
            .iter()
            .zip(&text.launch.outputs)
            .map(|(name, (element, shape))| Argument {
                name,
                element: *element,
                axes: shape.len(),
                count: MANY,
            })
            .collect();
        let (template, body) = (&text.launch.template, source.body);
        let whole = match gpu {
            Gpu::Cuda => {
                wrap::cuda(&format!("kernel_{n}"), &header(Some(gpu)), body, template, &text.inputs, &outputs)
            }
            _ => wrap::metal(
                &format!("kernel_{n}"),
                "#include \"header.h\"\n",
                body,
                template,
                &text.inputs,
                &outputs,
            ),
        };
        std::fs::write(folder.join(format!("{n}.{end}")), whole)?;
        let threads: usize = text.launch.group.iter().product();
        let gqa = text.launch.template.iter().find(|(name, _)| *name == "GQA").map(|(_, v)| match v {
            plan::Value::Int(n) => *n,
            plan::Value::Type(_) => 0,
        });
        let _ = writeln!(
            list,
            "  {{\"file\": \"{n}.{end}\", \"kernel\": \"kernel_{n}\", \"source\": {}, \"what\": {}, \"threads\": {threads}, \"gqa\": {}}}{}",
            quoted(source.name),
            quoted(&text.what),
            gqa.unwrap_or(0),
            if n + 1 < texts.len() { "," } else { "" }
        );
    }
    list.push_str("]\n");
    std::fs::write(folder.join("list.json"), list)?;
    println!("{gpu:?}: {} texts in {}", texts.len(), folder.display());
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("name the folder to write")?;
    // NVIDIA's compiler takes seconds for a text, the stand-in for Apple's a fifth of one.
    let make = |covering, step| {
        let mut texts = ruled();
        texts.extend(latent());
        texts.extend(cover(covering));
        texts.extend(others().into_iter().step_by(step));
        let uniform = |dim| form(Kind::Uniform, 4, dim);
        texts.extend(around(uniform(128), [1; 2], ElementType::F16, ElementType::F16));
        texts.extend(around(uniform(80), [20, 1], ElementType::F32, ElementType::F32));
        texts.extend(around(
            halves(Kind::Trellis8, 4, 2, 192),
            [12; 2],
            ElementType::BF16,
            ElementType::BF16,
        ));
        texts.extend(around(uniform(512), [1; 2], ElementType::F16, ElementType::F32));
        texts
    };
    write(Path::new(&folder), Gpu::Cuda, &make(24, 3))?;
    write(Path::new(&folder), Gpu::Metal, &make(160, 1))
}
