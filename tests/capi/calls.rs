//! The C API: the header is what the code says, the sample in C gives what the Rust engine gives, and bad calls end in a status.

use crate::capi::*;
use crate::common::capi::{SHARED, build, run};
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};
use turbomoq::Cpu;
use turbomoq::Rules;
use turbomoq::Tensor;
use turbomoq::cache::{LayerCache, LayerShape};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn header_is_what_the_code_says() {
    run(Command::new("python3").arg(root().join("mlx/capi/header.py")).arg("--check"));
}

/// Builds the libraries and the sample with them; gives the sample linked to the static and to the shared one.
#[cfg(unix)]
fn samples(out: &Path) -> [PathBuf; 2] {
    let built = build();
    ["libturbomoq_c.a", SHARED].map(|library| {
        let sample = out.join(library);
        let mut cc = Command::new("cc");
        cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-I"])
            .arg(root().join("mlx/include"));
        cc.arg(root().join("examples/c/llama_kv.c")).arg(built.join(library)).arg("-o").arg(&sample);
        cc.arg(format!("-Wl,-rpath,{}", built.display()));
        run(cc.args(["-lm", "-lpthread", "-ldl"]));
        sample
    })
}

/// What the sample prints, from the Rust engine.
fn expected() -> Vec<f32> {
    let mut state = 1u32;
    let mut rows = |tokens: usize, heads: usize| {
        let data: Vec<f32> = (0..tokens * heads * 64)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect();
        Tensor::new(&[1, tokens, heads, 64], data).unwrap().permute(&[0, 2, 1, 3]).unwrap()
    };
    let recipe = "best@3,sinks=4,window=128".parse().unwrap();
    let mut cache = LayerCache::new(Cpu, &recipe, 0, LayerShape { key_dim: 64, value_dim: 64 }).unwrap();
    let mut out = vec![];
    for step in 0..3 {
        let tokens = if step == 0 { 700 } else { 1 };
        let (k, v, q) = (rows(tokens, 4), rows(tokens, 4), rows(1, 8));
        cache.append(&k, &v).unwrap();
        out.extend(cache.attend(&q, &Rules::causal(0.125)).unwrap().to_f32().unwrap());
    }
    out
}

/// A number as `%a` prints it.
fn hex_float(text: &str) -> f64 {
    let (sign, rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let (digits, exponent) = rest.strip_prefix("0x").unwrap().split_once('p').unwrap();
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let mantissa = u64::from_str_radix(&format!("{whole}{part}"), 16).unwrap() as f64;
    sign * mantissa * 2f64.powi(exponent.parse::<i32>().unwrap() - 4 * part.len() as i32)
}

#[cfg(unix)]
#[test]
fn the_sample_gives_what_the_engine_gives() {
    let folder = tempfile::tempdir().unwrap();
    let samples = samples(folder.path());
    for sample in &samples {
        let output = run(&mut Command::new(sample));
        let text = String::from_utf8(output.stdout).unwrap();
        let got: Vec<f32> = text.lines().map(|line| hex_float(line) as f32).collect();
        assert_eq!(got, expected());
    }
    let valgrind = ["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"];
    match Command::new("valgrind").arg("--version").output() {
        Ok(_) => {
            // One worker: valgrind runs one thread at a time anyway.
            let mut checked = Command::new("valgrind");
            run(checked.env("RAYON_NUM_THREADS", "1").args(valgrind).arg(&samples[0]));
        }
        Err(_) => eprintln!("NOT RUN: the sample under valgrind, which is not installed"),
    }
}

#[test]
fn a_second_executor_finds_its_tables() {
    use tmq_status::*;
    let data: Vec<f32> = (0..3 * 2 * 96).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let rows = tmq_rows {
        struct_size: size_of::<tmq_rows>(),
        data: data.as_ptr().cast(),
        dtype: TMQ_F32,
        heads: 2,
        tokens: 3,
        head_dim: 96,
        token_stride: 192,
        head_stride: 96,
    };
    // SAFETY: every pointer is null or to something of this function that lives long enough.
    unsafe {
        for (spec, scales) in
            [(c"d96:b3:hadamard:uniform:matched:f16", 1), (c"d96:b3:hadamard:uniform:log8", 1)]
        {
            let (mut codec, mut codes) = (null_mut(), null_mut());
            assert_eq!(tmq_codec_new(spec.as_ptr(), &mut codec), TMQ_OK, "{}", last());
            assert_eq!(tmq_encode(codec, &rows, 0, &mut codes), TMQ_OK, "{}", last());
            let (mut rotation, mut levels) = (vec![0f32; 96 * 96], [0f32; 8]);
            let (mut words, mut factors, mut dense) =
                ([0u32; 3 * 2 * 9], vec![0f32; 3 * 2 * scales], [0f32; 576]);
            assert_eq!(tmq_codec_rotation(codec, rotation.as_mut_ptr(), 96 * 96), TMQ_OK);
            assert_eq!(tmq_codec_rotation(codec, rotation.as_mut_ptr(), 96), TMQ_SHAPE);
            assert_eq!(tmq_codec_levels(codec, levels.as_mut_ptr(), 8), TMQ_OK);
            assert_eq!(tmq_codec_levels(codec, levels.as_mut_ptr(), 16), TMQ_SHAPE);
            assert_eq!(tmq_codec_levels(null(), levels.as_mut_ptr(), 8), TMQ_NULL_POINTER);
            assert_eq!(tmq_codes_words(codes, words.as_mut_ptr(), words.len()), TMQ_OK);
            assert_eq!(tmq_codes_words(codes, null_mut(), words.len()), TMQ_NULL_POINTER);
            assert_eq!(tmq_codes_scales(codes, factors.as_mut_ptr(), factors.len()), TMQ_OK);
            assert_eq!(tmq_codes_scales(codes, factors.as_mut_ptr(), 0), TMQ_SHAPE);
            assert_eq!(tmq_decode(codes, dense.as_mut_ptr(), dense.len()), TMQ_OK);
            // What the tables say is what decoding gives.
            for (row, dense) in dense.chunks(96).enumerate() {
                let stream = &words[9 * row..][..9];
                let c =
                    |i: usize| levels[usize::from(turbomoq::internals::math::bits::code_at(stream, 3, i))];
                for (j, x) in dense.iter().enumerate() {
                    let sum: f32 = (0..96).map(|i| rotation[96 * i + j] * c(i)).sum();
                    assert!((factors[row] * sum - x).abs() < 1e-5, "row {row}, channel {j}");
                }
            }
            tmq_codes_free(codes);
            tmq_codec_free(codec);
        }
        let mut codec = null_mut();
        for spec in [c"d64:b3:hadamard:trellis8", c"d64:b3+32:hadamard:lloyd", c"d64:b3:affine32"] {
            assert_eq!(tmq_codec_new(spec.as_ptr(), &mut codec), TMQ_OK, "{}", last());
            let mut levels = [7f32; 16];
            assert_eq!(tmq_codec_levels(codec, levels.as_mut_ptr(), 8), TMQ_UNSUPPORTED, "{spec:?}");
            assert!(levels.iter().all(|x| *x == 7.0));
            tmq_codec_free(codec);
        }
    }
}

#[test]
fn t59_numbers_and_layouts_never_change() {
    use tmq_status::*;
    let statuses = [
        TMQ_OK,
        TMQ_NULL_POINTER,
        TMQ_STRUCT_SIZE,
        TMQ_SHAPE,
        TMQ_UNSUPPORTED,
        TMQ_PARSE,
        TMQ_NON_FINITE,
        TMQ_RANGE,
        TMQ_FAILED,
        TMQ_INTERNAL,
    ];
    assert_eq!(statuses.map(|s| s as u32), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!([TMQ_F32, TMQ_F16, TMQ_BF16, TMQ_KEY, TMQ_VALUE, TMQ_VERSION], [0, 1, 2, 0, 1, 3]);
    if cfg!(target_pointer_width = "64") {
        let sizes = [
            size_of::<tmq_rows>(),
            size_of::<tmq_codec_info>(),
            size_of::<tmq_cache_info>(),
            size_of::<tmq_rules>(),
        ];
        assert_eq!(sizes, [64, 40, 40, 56]);
        assert_eq!(std::mem::offset_of!(tmq_rows, token_stride), 48);
    }
    // Codecs have no numbers: a name that this library does not know is refused, whatever it meant elsewhere.
    let mut codec = null_mut();
    // SAFETY: a text and a place for a handle.
    let got = unsafe { tmq_codec_new(c"d64:b4:hadamard:lattice".as_ptr(), &mut codec) };
    assert!(got == TMQ_PARSE && codec.is_null() && last().contains("lattice"), "{got:?}: {}", last());
}

fn last() -> String {
    // SAFETY: the library's own text of this thread.
    unsafe { CStr::from_ptr(tmq_last_error()) }.to_str().unwrap().into()
}

#[test]
#[allow(clippy::too_many_lines)] // a list of bad calls
fn bad_calls_end_in_a_status() {
    use tmq_status::*;
    let data = [0.5f32; 4 * 64];
    let good = tmq_rows {
        struct_size: size_of::<tmq_rows>(),
        data: data.as_ptr().cast(),
        dtype: TMQ_F32,
        heads: 2,
        tokens: 2,
        head_dim: 64,
        token_stride: 128,
        head_stride: 64,
    };
    let nan = [f32::NAN; 4 * 64];
    // SAFETY: every pointer is null or to something of this function that lives long enough.
    unsafe {
        let mut codec = null_mut();
        for (spec, status) in [
            (c"d128:b0:lloyd", TMQ_UNSUPPORTED),
            (c"d0:b4:lloyd", TMQ_UNSUPPORTED),
            (c"d64:b9:lloyd", TMQ_UNSUPPORTED),
            (c"", TMQ_PARSE),
            (c"\xff", TMQ_PARSE),
        ] {
            let got = tmq_codec_new(spec.as_ptr(), &mut codec);
            assert!(got == status || got == TMQ_PARSE, "{spec:?}: {got:?} {}", last());
            assert!(codec.is_null() && !last().is_empty());
        }
        assert_eq!(
            tmq_codec_of_recipe(c"uniform@16/4".as_ptr(), TMQ_KEY, 0, 64, &mut codec),
            TMQ_UNSUPPORTED
        );
        assert_eq!(tmq_codec_of_recipe(c"uniform@4".as_ptr(), 7, 0, 64, &mut codec), TMQ_UNSUPPORTED);
        assert_eq!(tmq_codec_of_recipe(c"uniform@4".as_ptr(), TMQ_KEY, 0, 64, null_mut()), TMQ_NULL_POINTER);
        assert_eq!(tmq_codec_of_recipe(c"uniform@4".as_ptr(), TMQ_KEY, 0, 64, &mut codec), TMQ_OK);

        let mut codes = null_mut();
        let bad = [
            (tmq_rows { struct_size: 8, ..good }, TMQ_STRUCT_SIZE),
            (tmq_rows { data: null(), ..good }, TMQ_NULL_POINTER),
            (tmq_rows { data: good.data.byte_add(1), ..good }, TMQ_SHAPE),
            (tmq_rows { dtype: 3, ..good }, TMQ_UNSUPPORTED),
            (tmq_rows { heads: 0, ..good }, TMQ_SHAPE),
            (tmq_rows { head_dim: 32, ..good }, TMQ_SHAPE),
            (tmq_rows { tokens: usize::MAX, ..good }, TMQ_SHAPE),
            (tmq_rows { token_stride: usize::MAX, ..good }, TMQ_SHAPE),
            (tmq_rows { head_dim: 1 << 62, ..good }, TMQ_SHAPE),
            (tmq_rows { data: nan.as_ptr().cast(), ..good }, TMQ_NON_FINITE),
        ];
        for (rows, status) in &bad {
            assert_eq!(tmq_encode(codec, rows, 0, &mut codes), *status, "{rows:?}: {}", last());
            assert!(codes.is_null());
        }
        assert_eq!(tmq_encode(codec, null(), 0, &mut codes), TMQ_NULL_POINTER);
        assert_eq!(tmq_encode(null(), &good, 0, &mut codes), TMQ_NULL_POINTER);
        assert_eq!(tmq_encode(codec, &good, 0, &mut codes), TMQ_OK);
        tmq_codec_free(codec);

        // One float fewer than there are: an error, and nothing past the end is written.
        let mut out = [7f32; 4 * 64 + 1];
        assert_eq!(tmq_decode(codes, out.as_mut_ptr(), 4 * 64 - 1), TMQ_SHAPE);
        assert!(out.iter().all(|x| *x == 7.0), "{}", last());
        assert_eq!(tmq_decode(codes, out.as_mut_ptr(), 4 * 64), TMQ_OK);
        assert!(out[..256].iter().all(|x| (x - 0.5).abs() < 0.05) && out[256] == 7.0);
        assert_eq!(
            tmq_scores(
                codes,
                &tmq_rows { heads: 3, token_stride: 0, tokens: 1, ..good },
                out.as_mut_ptr(),
                6
            ),
            TMQ_SHAPE
        );
        // No query at all.
        assert_eq!(tmq_scores(codes, &tmq_rows { tokens: 0, ..good }, out.as_mut_ptr(), 0), TMQ_SHAPE);
        assert_eq!(tmq_weighted_sum(codes, out.as_ptr(), 2, 0, out.as_mut_ptr(), 0), TMQ_SHAPE);
        tmq_codes_free(codes);
        tmq_codes_free(null_mut());

        let mut cache = null_mut();
        assert_eq!(tmq_cache_new(c"best@4".as_ptr(), 0, 7, 64, &mut cache), TMQ_UNSUPPORTED);
        assert_eq!(tmq_cache_new(c"best@4".as_ptr(), 0, 64, 64, &mut cache), TMQ_OK);
        assert_eq!(
            tmq_cache_attend(cache, &good, 0.125, out.as_mut_ptr(), 256),
            TMQ_SHAPE,
            "nothing to attend to"
        );
        assert_eq!(tmq_cache_append(cache, &good, &tmq_rows { heads: 1, ..good }), TMQ_SHAPE);
        assert_eq!(tmq_cache_append(cache, &good, &good), TMQ_OK);
        assert_eq!(tmq_cache_attend(cache, &good, f32::NAN, out.as_mut_ptr(), 256), TMQ_NON_FINITE);
        let mut info = tmq_cache_info {
            struct_size: size_of::<tmq_cache_info>(),
            tokens: 0,
            offset: 0,
            bytes: 0,
            packed: 0,
        };
        assert_eq!(tmq_cache_get_info(cache, &mut info), TMQ_OK);
        assert_eq!((info.tokens, info.offset), (2, 2));
        assert_eq!(tmq_cache_trim(cache, 100, null_mut()), TMQ_OK);
        tmq_cache_free(cache);
    }
    // Texts are kept for each thread.
    let before = last();
    let other = std::thread::spawn(last).join().unwrap();
    assert!(other.is_empty() && !before.is_empty());
}

#[test]
fn structs_of_older_and_newer_headers_are_understood() {
    use tmq_status::*;
    #[repr(C)]
    struct Longer<T> {
        known: T,
        unknown: [u8; 16],
    }
    // SAFETY: every pointer is to something of this function that lives long enough, and no struct is shorter than it says.
    unsafe {
        let mut codec = null_mut();
        assert_eq!(tmq_codec_new(c"d64:b4:hadamard:beta".as_ptr(), &mut codec), TMQ_OK);
        let empty =
            |struct_size| tmq_codec_info { struct_size, head_dim: 7, row_bytes: 7, tile: 7, bits: 7.0 };
        let full = size_of::<tmq_codec_info>();
        // An older header: its fields are filled, and nothing behind them is touched.
        for size in size_of::<usize>()..=full {
            let mut info = Longer { known: empty(size), unknown: [9; 16] };
            assert_eq!(tmq_codec_get_info(codec, &mut info.known), TMQ_OK, "{size}: {}", last());
            let bytes = std::slice::from_raw_parts((&raw const info).cast::<u8>(), size_of_val(&info));
            let before = Longer { known: empty(size), unknown: [9; 16] };
            let before = std::slice::from_raw_parts((&raw const before).cast::<u8>(), size_of_val(&info));
            assert_eq!(bytes[size.min(36)..36], before[size.min(36)..36], "{size}");
            assert_eq!(info.unknown, [9; 16], "{size}");
            assert!(size < 16 || info.known.head_dim == 64, "{size}");
        }
        // A newer header: what this library does not know becomes zero.
        let mut info = Longer { known: empty(full + 16), unknown: [9; 16] };
        assert_eq!(tmq_codec_get_info(codec, &mut info.known), TMQ_OK, "{}", last());
        assert!(info.known.head_dim == 64 && info.known.struct_size == full + 16 && info.unknown == [0; 16]);
        for size in [0, 7, 1 << 20, usize::MAX] {
            let mut info = empty(size);
            assert_eq!(tmq_codec_get_info(codec, &mut info), TMQ_STRUCT_SIZE, "{size}");
            assert_eq!(info.head_dim, 7);
        }

        let data = [0.5f32; 64];
        let size = size_of::<tmq_rows>();
        let rows = |struct_size| tmq_rows {
            struct_size,
            data: data.as_ptr().cast(),
            dtype: TMQ_F32,
            heads: 1,
            tokens: 1,
            head_dim: 64,
            token_stride: 64,
            head_stride: 64,
        };
        let mut codes = null_mut();
        let newer = Longer { known: rows(size + 16), unknown: [0; 16] };
        assert_eq!(tmq_encode(codec, &newer.known, 0, &mut codes), TMQ_OK, "{}", last());
        tmq_codes_free(codes);
        let asks_for_more =
            Longer { known: rows(size + 16), unknown: [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] };
        assert_eq!(tmq_encode(codec, &asks_for_more.known, 0, &mut codes), TMQ_STRUCT_SIZE);
        // No header ever had rows without all of these fields.
        assert_eq!(tmq_encode(codec, &rows(size - 4), 0, &mut codes), TMQ_STRUCT_SIZE);
        let layers = [newer, Longer { known: rows(size + 16), unknown: [0; 16] }];
        let mut scores = [0f64; 2];
        assert_eq!(
            tmq_score_heads(&layers[0].known, 2, null(), scores.as_mut_ptr(), 2),
            TMQ_OK,
            "{}",
            last()
        );
        tmq_codec_free(codec);
    }
}

#[test]
fn counts_that_no_memory_holds_are_refused() {
    use tmq_status::*;
    let data = [0.5f32; 64];
    let rows = |heads, tokens, head_dim| tmq_rows {
        struct_size: size_of::<tmq_rows>(),
        data: data.as_ptr().cast(),
        dtype: TMQ_F32,
        heads,
        tokens,
        head_dim,
        token_stride: 0,
        head_stride: 0,
    };
    let (mut numbers, mut bits) = ([0f64; 4], [7u8; 4]);
    // SAFETY: the strides of zero keep all rows inside of `data`; the other calls end before they read.
    unsafe {
        let mut codec = null_mut();
        assert_eq!(tmq_codec_new(c"d64:b4:hadamard:beta".as_ptr(), &mut codec), TMQ_OK);
        let mut codes = null_mut();
        for (heads, tokens) in [(1, 1 << 33), (1 << 33, 1), (1 << 20, 1 << 20), (8, 1 << 29)] {
            let got = tmq_encode(codec, &rows(heads, tokens, 64), 0, &mut codes);
            assert!(got == TMQ_SHAPE && codes.is_null(), "{heads} x {tokens}: {got:?} {}", last());
        }
        tmq_codec_free(codec);
        let wide = vec![0.5f32; 1_000_000];
        let wide = tmq_rows { data: wide.as_ptr().cast(), ..rows(1, 2, 1_000_000) };
        assert_eq!(tmq_score_heads(&wide, 1, null(), numbers.as_mut_ptr(), 1), TMQ_SHAPE, "{}", last());
        for (layers, heads, len) in [
            (1 << 32, 1 << 32, usize::MAX),
            (usize::MAX, 2, usize::MAX),
            (usize::MAX, 1, usize::MAX),
            (2, 2, 5),
        ] {
            let got = tmq_allocate_bits(numbers.as_ptr(), layers, heads, 64, 3.0, bits.as_mut_ptr(), len);
            assert_eq!(got, TMQ_SHAPE, "{layers} x {heads}: {}", last());
        }
    }
    assert_eq!(bits, [7; 4]);
}

/// Encodes in a process, then in its child, in the child of that, and in the parent again.
#[cfg(unix)]
const FORKS: &str = r#"
import ctypes, os, signal, struct, sys

library = ctypes.CDLL(sys.argv[1])
library.tmq_last_error.restype = ctypes.c_char_p
heads, tokens, dim = 8, 512, 128
data = (ctypes.c_float * (heads * tokens * dim))(*[(i * 37 % 101) / 50 - 1 for i in range(heads * tokens * dim)])


class Rows(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("data", ctypes.c_void_p), ("dtype", ctypes.c_uint32)] + [
        (name, ctypes.c_size_t) for name in ("heads", "tokens", "head_dim", "token_stride", "head_stride")
    ]


def encode():
    rows = Rows(ctypes.sizeof(Rows), ctypes.addressof(data), 0, heads, tokens, dim, dim, tokens * dim)
    codec, codes = ctypes.c_void_p(), ctypes.c_void_p()
    out = (ctypes.c_float * len(data))()
    for status in (
        library.tmq_codec_new(b"d128:b4:hadamard:beta", ctypes.byref(codec)),
        library.tmq_encode(codec, ctypes.byref(rows), 1, ctypes.byref(codes)),
        library.tmq_decode(codes, out, ctypes.c_size_t(len(out))),
    ):
        assert status == 0, library.tmq_last_error()
    return bytes(out)


def child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            work()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}"


first = encode()


def same():
    assert encode() == first


child(same)
child(lambda: (child(same), same()))
same()
"#;

#[cfg(unix)]
#[test]
fn a_forked_child_encodes_as_its_parent_did() {
    run(Command::new("python3").args(["-c", FORKS]).arg(build().join(SHARED)));
}
