//! Damage to bytes that were good: bits, runs, numbers, lengths and the header of a safetensors file.

use turbomoq::internals::math::rng::Rng;

/// Numbers that counts, shapes and offsets break on.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "127",
    "4096",
    "65537",
    "2147483648",
    "4294967295",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "0.5",
    "null",
];

/// Bytes that mean something to a parser.
const BYTES: &[u8] = b"\0\x01\x7f\x80\xff\"{}[],:=/.@-9x\n";

/// Makes damaged copies of good inputs; the same seed makes the same ones.
pub struct Mutator {
    rng: Rng,
}

impl Mutator {
    pub fn new(seed: u64, kind: u64) -> Mutator {
        Mutator { rng: Rng::new(seed, kind) }
    }

    /// A number below `n`, which is not zero.
    pub fn below(&mut self, n: usize) -> usize {
        (self.rng.bits() as usize) % n
    }

    /// One of the inputs with one to four faults.
    pub fn text(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.below(inputs.len())].clone();
        for _ in 0..1 + self.below(4) {
            self.damage(&mut bytes, inputs);
        }
        bytes
    }

    /// As [`Mutator::text`] for safetensors files; half of the faults are in the header alone, whose length is then mostly right.
    pub fn safetensors(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        if self.below(2) == 0 {
            return self.text(inputs);
        }
        let file = &inputs[self.below(inputs.len())];
        let length = u64::from_le_bytes(*file.first_chunk().expect("a good file")) as usize;
        let (mut header, data) = (file[8..8 + length].to_vec(), &file[8 + length..]);
        for _ in 0..1 + self.below(3) {
            self.damage(&mut header, &[]);
        }
        let said = if self.below(8) == 0 { length } else { header.len() };
        [&(said as u64).to_le_bytes()[..], &header, data].concat()
    }

    fn damage(&mut self, bytes: &mut Vec<u8>, inputs: &[Vec<u8>]) {
        if bytes.is_empty() {
            bytes.push(BYTES[self.below(BYTES.len())]);
            return;
        }
        let at = self.below(bytes.len());
        let run = (1 + self.below(16)).min(bytes.len() - at);
        match self.below(10) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes[at] = BYTES[self.below(BYTES.len())],
            2 => drop(bytes.drain(at..at + run)),
            3 => {
                let copy = bytes[at..at + run].to_vec();
                bytes.splice(at..at, copy);
            }
            4 => bytes.truncate(at),
            5 => {
                let new: Vec<u8> = (0..run).map(|_| self.rng.bits() as u8).collect();
                bytes.splice(at..at, new);
            }
            6 if !inputs.is_empty() => {
                let other = &inputs[self.below(inputs.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[at.min(other.len())..]);
            }
            7 if bytes.len() >= 8 => {
                let length = [0, 1, 7, 1 << 20, 1 << 31, 1 << 40, u64::MAX / 2, u64::MAX][self.below(8)];
                bytes[..8].copy_from_slice(&u64::to_le_bytes(length));
            }
            _ => self.number(bytes, at),
        }
    }

    /// Puts another number in the place of the first one from `at` on.
    fn number(&mut self, bytes: &mut Vec<u8>, at: usize) {
        let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|i| at + i) else { return };
        let digits = bytes[start..].iter().take_while(|b| b.is_ascii_digit()).count();
        bytes.splice(start..start + digits, NUMBERS[self.below(NUMBERS.len())].bytes());
    }
}
