//! Caches behind a model that runs elsewhere: what `tmq_caches_update_and_attend` and its companions give is what Rust gives.

use crate::capi::tmq_status::*;
use crate::capi::*;
use crate::common::gauss;
use std::ptr::{null, null_mut};
use turbomoq::cache::{HeadGroups, LayerShape};
use turbomoq::{Cpu, Rules, Tensor};

const RECIPE: &std::ffi::CStr = c"best@3,sinks=4,window=32";
const HEADS: usize = 2;
const DIM: usize = 64;

/// Rows of a contiguous tensor [1, H, T, D].
fn view(x: &Tensor) -> tmq_rows {
    let Tensor::F32(array) = x else { panic!("f32") };
    let [_, heads, tokens, head_dim] = *x.shape() else { panic!("four axes") };
    let data = array.as_slice().expect("contiguous").as_ptr().cast();
    let struct_size = size_of::<tmq_rows>();
    let (token_stride, head_stride) = (head_dim, tokens * head_dim);
    tmq_rows { struct_size, data, dtype: TMQ_F32, heads, tokens, head_dim, token_stride, head_stride }
}

fn rules(scale: f32) -> tmq_rules {
    tmq_rules {
        struct_size: size_of::<tmq_rules>(),
        scale,
        causal: 1,
        sliding_window: 0,
        soft_cap: 0.0,
        sink_logits: null(),
        mask: null(),
        mask_heads: 0,
    }
}

fn new() -> *mut tmq_cache {
    let mut cache = null_mut();
    // SAFETY: a text and a place for the handle.
    assert_eq!(unsafe { tmq_cache_new(RECIPE.as_ptr(), 0, DIM, DIM, &mut cache) }, TMQ_OK);
    cache
}

fn info(cache: *const tmq_cache) -> tmq_cache_info {
    let struct_size = size_of::<tmq_cache_info>();
    let mut info = tmq_cache_info { struct_size, tokens: 0, offset: 0, bytes: 0, packed: 0 };
    // SAFETY: a live cache and a struct of its size.
    assert_eq!(unsafe { tmq_cache_get_info(cache, &mut info) }, TMQ_OK);
    info
}

/// One call for one cache: queries, keys and values of the same tokens.
fn step(cache: *mut tmq_cache, q: &Tensor, k: &Tensor, v: &Tensor) -> (tmq_status, Vec<f32>) {
    let mut out = vec![7f32; q.shape()[1] * q.shape()[2] * DIM];
    let (q, k, v, rules) = (view(q), view(k), view(v), rules(0.125));
    // SAFETY: one entry each, all of which live through the call.
    let status =
        unsafe { tmq_caches_update_and_attend(&cache, 1, &q, &k, &v, &rules, &out.as_mut_ptr(), &out.len()) };
    (status, out)
}

fn saved(cache: *const tmq_cache) -> Vec<u8> {
    let (mut bytes, mut len) = (null_mut(), 0);
    // SAFETY: a live cache; the bytes are freed once.
    unsafe {
        assert_eq!(tmq_cache_save(cache, &mut bytes), TMQ_OK);
        assert_eq!(tmq_bytes_len(bytes, &mut len), TMQ_OK);
        let mut out = vec![0u8; len];
        assert_eq!(tmq_bytes_copy(bytes, out.as_mut_ptr(), len - 1), TMQ_SHAPE);
        assert_eq!(tmq_bytes_copy(bytes, out.as_mut_ptr(), len), TMQ_OK);
        tmq_bytes_free(bytes);
        out
    }
}

fn loaded(bytes: &[u8]) -> Result<*mut tmq_cache, tmq_status> {
    let mut cache = null_mut();
    // SAFETY: the bytes are there.
    match unsafe { tmq_cache_load(bytes.as_ptr(), bytes.len(), &mut cache) } {
        TMQ_OK => Ok(cache),
        status => {
            assert!(cache.is_null());
            Err(status)
        }
    }
}

#[test]
fn caches_of_c_and_of_rust_answer_the_same() {
    let shape = LayerShape { key_dim: DIM, value_dim: DIM };
    let recipe = RECIPE.to_str().unwrap().parse().unwrap();
    let mut rust = HeadGroups::new(Cpu, &recipe, 0, shape, HEADS).unwrap();
    let cache = new();
    assert_eq!((info(cache).offset, info(cache).packed), (0, 0));
    for (i, tokens) in [300, 1, 5, 1].into_iter().enumerate() {
        let rows = |heads, stream| gauss(&[1, heads, tokens, DIM], stream + 10 * i as u64);
        let (q, k, v) = (rows(4, 1), rows(HEADS, 2), rows(HEADS, 3));
        let want = rust.update_and_attend(&q, &k, &v, &Rules::causal(0.125)).unwrap();
        let want = want.permute(&[0, 2, 1, 3]).unwrap().to_f32().unwrap();
        assert_eq!(step(cache, &q, &k, &v), (TMQ_OK, want));
    }
    let held = info(cache);
    assert_eq!((held.tokens, held.offset, held.bytes), (307, 307, rust.nbytes()));
    assert!(held.packed >= 128, "{} tokens are packed", held.packed);
    // Unpacked, saved and loaded, copied: the same rows and the same bytes; a copy goes on by itself.
    let (mut keys, mut values) = (vec![0f32; HEADS * 307 * DIM], vec![0f32; HEADS * 307 * DIM]);
    // SAFETY: as many floats as said.
    unsafe {
        let (k, v) = (keys.as_mut_ptr(), values.as_mut_ptr());
        assert_eq!(tmq_cache_fetch(cache, k, keys.len() - 1, v, values.len()), TMQ_SHAPE);
        assert_eq!(tmq_cache_fetch(cache, k, keys.len(), v, values.len()), TMQ_OK);
    }
    let (k, v) = rust.fetch().unwrap();
    assert_eq!((keys, values), (k.to_f32().unwrap(), v.to_f32().unwrap()));
    let bytes = saved(cache);
    let again = loaded(&bytes).unwrap();
    assert_eq!(saved(again), bytes);
    let mut copy = null_mut();
    // SAFETY: live caches, each freed once.
    unsafe {
        assert_eq!(tmq_cache_copy(cache, &mut copy), TMQ_OK);
        assert_eq!(tmq_cache_trim(copy, 7, null_mut()), TMQ_OK);
        assert_eq!((info(copy).offset, info(cache).offset), (300, 307));
        assert_eq!(saved(cache), bytes);
        for cache in [cache, again, copy] {
            tmq_cache_free(cache);
        }
    }
}

#[test]
fn several_sequences_in_one_call_are_each_as_alone() {
    let rows = |heads, tokens, stream| gauss(&[1, heads, tokens, DIM], stream);
    let lens = [200usize, 3, 70];
    let parts: Vec<[Tensor; 3]> = lens
        .iter()
        .enumerate()
        .map(|(i, &n)| {
            [rows(4, n, 1 + i as u64), rows(HEADS, n, 11 + i as u64), rows(HEADS, n, 21 + i as u64)]
        })
        .collect();
    let alone: Vec<Vec<f32>> = parts
        .iter()
        .map(|[q, k, v]| {
            let cache = new();
            let (status, out) = step(cache, q, k, v);
            assert_eq!(status, TMQ_OK);
            // SAFETY: freed once.
            unsafe { tmq_cache_free(cache) };
            out
        })
        .collect();
    let caches = [new(), new(), new()];
    let side = |k: usize| parts.iter().map(|p| view(&p[k])).collect::<Vec<_>>();
    let (q, k, v, all) = (side(0), side(1), side(2), vec![rules(0.125); 3]);
    let mut outs: Vec<Vec<f32>> = alone.iter().map(|out| vec![0.0; out.len()]).collect();
    let places: Vec<*mut f32> = outs.iter_mut().map(|out| out.as_mut_ptr()).collect();
    let sizes: Vec<usize> = outs.iter().map(Vec::len).collect();
    let call = |q: &[tmq_rows]| {
        let (caches, places, sizes) = (caches.as_ptr(), places.as_ptr(), sizes.as_ptr());
        // SAFETY: three entries each, all of which live through the call.
        unsafe {
            tmq_caches_update_and_attend(
                caches,
                3,
                q.as_ptr(),
                k.as_ptr(),
                v.as_ptr(),
                all.as_ptr(),
                places,
                sizes,
            )
        }
    };
    // The second does not fit: the first has its tokens, the others have none.
    let mut bad = q.clone();
    bad[1].head_dim = 32;
    assert_eq!(call(&bad), TMQ_SHAPE);
    assert_eq!(caches.map(|c| info(c).offset), [200, 0, 0]);
    // SAFETY: a live cache.
    assert_eq!(unsafe { tmq_cache_trim(caches[0], 200, null_mut()) }, TMQ_OK);
    assert_eq!(call(&q), TMQ_OK);
    assert_eq!(outs, alone);
    for cache in caches {
        // SAFETY: freed once.
        unsafe { tmq_cache_free(cache) };
    }
}

#[test]
fn rules_and_bytes_that_are_not_what_they_say_end_in_a_status() {
    let cache = new();
    let (q, k, v) = (gauss(&[1, 4, 3, DIM], 1), gauss(&[1, HEADS, 3, DIM], 2), gauss(&[1, HEADS, 3, DIM], 3));
    let (qs, ks, vs) = (view(&q), view(&k), view(&v));
    let mut out = vec![0f32; 4 * 3 * DIM];
    let (place, size) = (out.as_mut_ptr(), out.len());
    let call = |rules: *const tmq_rules, len: usize| {
        // SAFETY: one entry each.
        unsafe { tmq_caches_update_and_attend(&cache, 1, &qs, &ks, &vs, rules, &place, &len) }
    };
    let mask = [0f32; 9];
    for (bad, status) in [
        (tmq_rules { struct_size: 4, ..rules(0.125) }, TMQ_STRUCT_SIZE),
        (rules(f32::NAN), TMQ_NON_FINITE),
        (tmq_rules { soft_cap: f32::INFINITY, ..rules(0.125) }, TMQ_NON_FINITE),
        (tmq_rules { mask: mask.as_ptr(), mask_heads: 3, ..rules(0.125) }, TMQ_SHAPE),
    ] {
        assert_eq!(call(&bad, size), status, "{bad:?}");
        assert_eq!(info(cache).offset, 0, "nothing has changed");
    }
    let good = rules(0.125);
    assert_eq!((call(null(), size), call(&good, size - 1)), (TMQ_NULL_POINTER, TMQ_SHAPE));
    assert_eq!(info(cache).offset, 0);
    let masked = tmq_rules { mask: mask.as_ptr(), mask_heads: 1, ..good };
    assert_eq!(call(&masked, size), TMQ_OK);
    // Every shorter file, and every byte turned: an error or a cache, never a fault.
    let bytes = saved(cache);
    for n in (0..bytes.len()).step_by(7) {
        assert!(loaded(&bytes[..n]).is_err(), "{n} of {} bytes", bytes.len());
    }
    for i in (0..bytes.len().min(4096)).step_by(3) {
        let mut turned = bytes.clone();
        turned[i] ^= 1 << (i % 8);
        if let Ok(cache) = loaded(&turned) {
            // SAFETY: freed once.
            unsafe { tmq_cache_free(cache) };
        }
    }
    // SAFETY: null is refused, and the cache is freed once.
    unsafe {
        let mut none = null_mut();
        assert_eq!(tmq_cache_load(null(), 10, &mut none), TMQ_NULL_POINTER);
        assert_eq!(tmq_cache_copy(null(), &mut none), TMQ_NULL_POINTER);
        tmq_cache_free(cache);
    }
}
