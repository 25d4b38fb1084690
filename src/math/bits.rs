//! Packing: the codes of a vector are one LSB-first bit stream in little-endian u32 words, padded to a word.
//!
//! For 2, 3, 4, 5, 6 and 8 bits this is MLX's own quantized layout; 1 and 7 bits follow the same rule. Thirty-two codes of b
//! bits fill b words. Inside such a block eight bytes at a time fold into 8 b bits: pairs, then quads, then halves move
//! together, three steps of shift and mask.

/// Codes that fill whole words at any width.
pub const CODES_PER_UNPACK: usize = 32;

/// Words that hold `dim` codes of `bits` bits.
pub const fn words(dim: usize, bits: u8) -> usize {
    (dim * bits as usize).div_ceil(32)
}

/// Masks of the three folding steps: what the low half of each 16-, 32- and 64-bit lane holds.
const fn masks(bits: usize) -> [u64; 3] {
    let m8 = (1u64 << bits) - 1;
    let m16 = (1u64 << (2 * bits)) - 1;
    let m32 = if bits == 8 { u32::MAX as u64 } else { (1u64 << (4 * bits)) - 1 };
    [m8 * 0x0001_0001_0001_0001, m16 * 0x0000_0001_0000_0001, m32]
}

#[inline(always)]
fn fold<const B: usize>(codes: u64) -> u64 {
    let m = const { masks(B) };
    let x = (codes & m[0]) | ((codes >> (8 - B)) & (m[0] << B));
    let x = (x & m[1]) | ((x >> (16 - 2 * B)) & (m[1] << (2 * B)));
    (x & m[2]) | ((x >> (32 - 4 * B)) & (m[2] << (4 * B)))
}

#[inline(always)]
fn unfold<const B: usize>(stream: u64) -> u64 {
    let m = const { masks(B) };
    let x = (stream & m[2]) | ((stream & (m[2] << (4 * B))) << (32 - 4 * B));
    let x = (x & m[1]) | ((x & (m[1] << (2 * B))) << (16 - 2 * B));
    (x & m[0]) | ((x & (m[0] << B)) << (8 - B))
}

#[inline(always)]
fn pack_block<const B: usize>(codes: &[u8; CODES_PER_UNPACK]) -> [u32; B] {
    let eights: [u64; 4] =
        std::array::from_fn(|i| fold::<B>(u64::from_le_bytes(*codes[8 * i..].first_chunk().expect("eight"))));
    std::array::from_fn(|w| {
        let mut word = 0;
        for (i, x) in eights.iter().enumerate() {
            // Bits 8 B i and on of the block; those of word w are 32 w and on.
            let (start, first) = (8 * B * i, 32 * w);
            if start <= first && first < start + 8 * B {
                word |= x >> (first - start);
            } else if first < start && start < first + 32 {
                word |= x << (start - first);
            }
        }
        word as u32
    })
}

#[inline(always)]
fn unpack_block<const B: usize>(words: &[u32; B]) -> [u8; CODES_PER_UNPACK] {
    let mut codes = [0; CODES_PER_UNPACK];
    for (i, out) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (word, shift) = (8 * B * i / 32, 8 * B * i % 32);
        let mut x = u64::from(words[word]) >> shift;
        for (k, &next) in words[word + 1..].iter().take(2).enumerate() {
            let at = 32 * (k + 1) - shift;
            if at < 8 * B {
                x |= u64::from(next) << at;
            }
        }
        *out = unfold::<B>(x).to_le_bytes();
    }
    codes
}

/// Calls `$f::<B>` for the width `$bits`.
macro_rules! by_width {
    ($bits:expr, $f:ident($($arg:expr),*)) => {
        match $bits {
            1 => $f::<1>($($arg),*),
            2 => $f::<2>($($arg),*),
            3 => $f::<3>($($arg),*),
            4 => $f::<4>($($arg),*),
            5 => $f::<5>($($arg),*),
            6 => $f::<6>($($arg),*),
            7 => $f::<7>($($arg),*),
            _ => $f::<8>($($arg),*),
        }
    };
}

/// Packs one code a byte into words. Codes must be below `2^bits`; `out` has [`words`] entries and is overwritten.
#[inline(always)]
pub fn pack(codes: &[u8], bits: u8, out: &mut [u32]) {
    assert_eq!(out.len(), words(codes.len(), bits), "words of {} codes of {bits} bits", codes.len());
    by_width!(bits, pack_all(codes, out));
}

#[inline(always)]
fn pack_all<const B: usize>(codes: &[u8], out: &mut [u32]) {
    let (codes, rest) = codes.as_chunks::<CODES_PER_UNPACK>();
    let (out, last) = out.split_at_mut(codes.len() * B);
    for (codes, out) in codes.iter().zip(out.as_chunks_mut::<B>().0) {
        *out = pack_block(codes);
    }
    if !rest.is_empty() {
        let mut block = [0; CODES_PER_UNPACK];
        block[..rest.len()].copy_from_slice(rest);
        last.copy_from_slice(&pack_block::<B>(&block)[..last.len()]);
    }
}

/// Unpacks words into one code a byte: the inverse of [`pack`].
#[inline(always)]
pub fn unpack(words_in: &[u32], bits: u8, codes: &mut [u8]) {
    assert_eq!(words_in.len(), words(codes.len(), bits), "words of {} codes of {bits} bits", codes.len());
    by_width!(bits, unpack_all(words_in, codes));
}

#[inline(always)]
fn unpack_all<const B: usize>(words: &[u32], codes: &mut [u8]) {
    let (codes, rest) = codes.as_chunks_mut::<CODES_PER_UNPACK>();
    let (words, last) = words.split_at(codes.len() * B);
    for (words, codes) in words.as_chunks::<B>().0.iter().zip(codes) {
        *codes = unpack_block(words);
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&unpack_block::<B>(&padded(last))[..rest.len()]);
    }
}

#[inline(always)]
fn padded<const B: usize>(words: &[u32]) -> [u32; B] {
    std::array::from_fn(|i| words.get(i).copied().unwrap_or(0))
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
                if !used.is_multiple_of(32) {
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
