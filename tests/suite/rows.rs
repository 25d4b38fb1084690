//! The table of docs/rows.md, which readers of the format rely on, against the buffers that the encoder fills.

use crate::common::keys;
use std::sync::Arc;
use turbomoq::{Buffer, Codec, CodecSpec, Cpu, Engine};

#[test]
fn rows_have_the_sizes_that_the_page_names() {
    let page = include_str!("../../docs/rows.md");
    let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("| `d")).collect();
    assert!(lines.len() >= 10, "only {} codecs on the page", lines.len());
    for line in lines {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let text = cells[1].split('`').nth(1).unwrap();
        let [words, scales, bytes] = [2, 3, 4].map(|i| cells[i].parse::<usize>().unwrap());
        let spec: CodecSpec = format!("{text}:seed42").parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(spec.to_string(), format!("{text}:seed42"), "the page says everything");
        let codec = Arc::new(Codec::new(spec).unwrap());
        let tokens = 64;
        let rows = keys(&[1, 2, tokens, spec.head_dim], 5);
        let frame = Cpu.frame(&codec, false, &rows, None).unwrap();
        let codes = Cpu.encode(&codec, frame, &rows).unwrap();
        assert_eq!(codes.words().shape(), [1, 2, tokens, words], "{text}");
        assert_eq!(codes.scales().shape(), [1, 2, tokens, scales], "{text}");
        let held = Buffer::nbytes(codes.words()) + Buffer::nbytes(codes.scales());
        assert_eq!(held, 2 * tokens * bytes, "{text}");
    }
}
