//! Packing: the codes of a vector are one LSB-first bit stream in little-endian u32 words, padded to a word.
//!
//! For 2, 3, 4, 5, 6 and 8 bits this is MLX's own quantized layout; 1 and 7 bits follow the same rule. Eight codes of any
//! width fill a whole number of bytes, so one routine that folds eight bytes into `8 * bits` bits serves all widths: pairs,
//! then quads, then halves move together, three steps of shift and mask.

/// Words that hold `dim` codes of `bits` bits.
pub const fn words(dim: usize, bits: u8) -> usize {
    (dim * bits as usize).div_ceil(32)
}

/// Masks of the three folding steps: what the low half of each 16-, 32- and 64-bit lane holds.
const fn masks(bits: u8) -> [u64; 3] {
    let b = bits as u32;
    let m8 = (1u64 << b) - 1;
    let m16 = (1u64 << (2 * b)) - 1;
    let m32 = if b == 8 { u32::MAX as u64 } else { (1u64 << (4 * b)) - 1 };
    [m8 * 0x0001_0001_0001_0001, m16 * 0x0000_0001_0000_0001, m32]
}

#[inline(always)]
fn fold(codes: u64, b: u32, m: [u64; 3]) -> u64 {
    let x = (codes & m[0]) | ((codes >> (8 - b)) & (m[0] << b));
    let x = (x & m[1]) | ((x >> (16 - 2 * b)) & (m[1] << (2 * b)));
    (x & m[2]) | ((x >> (32 - 4 * b)) & (m[2] << (4 * b)))
}

#[inline(always)]
fn unfold(stream: u64, b: u32, m: [u64; 3]) -> u64 {
    let x = (stream & m[2]) | ((stream & (m[2] << (4 * b))) << (32 - 4 * b));
    let x = (x & m[1]) | ((x & (m[1] << (2 * b))) << (16 - 2 * b));
    (x & m[0]) | ((x & (m[0] << b)) << (8 - b))
}

/// Packs one code a byte into words. Codes must be below `2^bits`; `out` has [`words`] entries and is overwritten.
#[inline(always)]
pub fn pack(codes: &[u8], bits: u8, out: &mut [u32]) {
    let (b, m) = (bits as u32, masks(bits));
    assert_eq!(out.len(), words(codes.len(), bits), "words of {} codes of {bits} bits", codes.len());
    out.fill(0);
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
    let n = bits as usize;
    let mut chunks = codes.chunks_exact(8);
    for (i, chunk) in chunks.by_ref().enumerate() {
        let x = fold(u64::from_le_bytes(chunk.try_into().expect("eight codes")), b, m).to_le_bytes();
        bytes[i * n..][..n].copy_from_slice(&x[..n]);
    }
    let rest = chunks.remainder();
    if !rest.is_empty() {
        let mut tail = [0u8; 8];
        tail[..rest.len()].copy_from_slice(rest);
        let x = fold(u64::from_le_bytes(tail), b, m).to_le_bytes();
        let start = codes.len() / 8 * n;
        let end = bytes.len().min(start + n);
        bytes[start..end].copy_from_slice(&x[..end - start]);
    }
    if cfg!(target_endian = "big") {
        out.iter_mut().for_each(|w| *w = u32::from_le(*w));
    }
}

/// Unpacks words into one code a byte: the inverse of [`pack`].
#[inline(always)]
pub fn unpack(words_in: &[u32], bits: u8, codes: &mut [u8]) {
    let (b, m) = (bits as u32, masks(bits));
    assert_eq!(words_in.len(), words(codes.len(), bits), "words of {} codes of {bits} bits", codes.len());
    if cfg!(target_endian = "big") {
        for (i, c) in codes.iter_mut().enumerate() {
            *c = code_at(words_in, bits, i);
        }
        return;
    }
    let bytes: &[u8] = bytemuck::cast_slice(words_in);
    let n = bits as usize;
    for (i, chunk) in codes.chunks_mut(8).enumerate() {
        let x = match bytes.get(i * n..i * n + 8) {
            Some(eight) => u64::from_le_bytes(eight.try_into().expect("eight bytes")),
            None => {
                let mut tail = [0u8; 8];
                let left = &bytes[i * n..];
                tail[..left.len()].copy_from_slice(left);
                u64::from_le_bytes(tail)
            }
        };
        let eight = unfold(x, b, m).to_le_bytes();
        match <&mut [u8; 8]>::try_from(&mut *chunk) {
            Ok(full) => *full = eight,
            Err(_) => chunk.copy_from_slice(&eight[..chunk.len()]),
        }
    }
}

/// The code of coordinate `i`: the definition that the fast routines are tested against.
pub fn code_at(words: &[u32], bits: u8, i: usize) -> u8 {
    let bit = i * bits as usize;
    let low = (words[bit / 32] >> (bit % 32)) as u64;
    let high = words.get(bit / 32 + 1).map_or(0, |&w| (w as u64) << (32 - bit % 32));
    ((low | high) & ((1u64 << bits) - 1)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pack_follows_the_rule_for_all_widths_and_lengths() {
        for bits in 1..=8u8 {
            for dim in [1, 2, 7, 8, 9, 31, 32, 33, 64, 80, 96, 112, 128, 192, 256, 576] {
                let codes: Vec<u8> =
                    (0..dim).map(|i| ((i * 2_654_435_761usize) >> 7) as u8 & (255 >> (8 - bits))).collect();
                let mut packed = vec![!0; words(dim, bits)];
                pack(&codes, bits, &mut packed);
                for (i, &code) in codes.iter().enumerate() {
                    assert_eq!(code_at(&packed, bits, i), code, "{bits} bits, dim {dim}, coordinate {i}");
                }
                let used = dim * bits as usize;
                if used % 32 != 0 {
                    assert_eq!(packed[used / 32] >> (used % 32), 0, "padding bits, {bits} bits, dim {dim}");
                }
                let mut back = vec![0; dim];
                unpack(&packed, bits, &mut back);
                assert_eq!(back, codes, "{bits} bits, dim {dim}");
            }
        }
    }

    #[test]
    fn widths_are_padded_to_a_word() {
        // T10: words of a row, D = 80 at 2, 3, 4, 5, 6, 8 bits; D = 128 and 256 at 3.
        assert_eq!([2, 3, 4, 5, 6, 8].map(|b| words(80, b)), [5, 8, 10, 13, 15, 20]);
        assert_eq!((words(128, 3), words(256, 3)), (12, 24));
    }
}
