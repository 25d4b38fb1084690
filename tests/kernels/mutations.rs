//! Broken texts must fail: a barrier taken away, an index moved, a bound shifted. What no test would notice proves nothing.

use super::attention::{self, ONE, Rules, Side, close, merge_call};
use super::bench::{Bench, Call};
use super::encoding;
use turbomoq::internals::engine::mlx::kernels::plan::{Element, Pass};
use turbomoq::{CodecSpec, Grid};

/// A text by its name, what is taken out of it, and what is put there.
type Mutation = (&'static str, &'static str, &'static str);

fn broken(calls: &[Call], (name, from, to): Mutation) -> Option<Bench> {
    Bench::with(calls, |text, body| {
        if text != name {
            return body;
        }
        assert_eq!(body.matches(from).count(), 1, "{name} holds this once: {from}");
        body.replace(from, to)
    })
}

fn case() -> attention::Case {
    let spec = CodecSpec::new(80, 3, Grid::Trellis { states: 8 });
    let (k, v) =
        (Side::packed(spec, [2, 1, 37], 1), Side::packed(CodecSpec::new(64, 5, Grid::Lloyd), [2, 1, 37], 2));
    let pass =
        Pass { batch: 2, group: 2, queries: 2, tokens: 37, position: 35, window: 30, causal: true, ..ONE };
    attention::case(&k, &v, &Rules { pass, first: vec![0, 9], cap: 0.0, sparse: 0.0 }, 3)
}

#[test]
fn broken_attention_fails() {
    let case = case();
    let calls = [case.call.clone()];
    let Some(bench) = Bench::new(&calls) else { return };
    let parts = bench.run(&calls).unwrap();
    let merges = [merge_call(&case, &parts[0], Element::F32, true)];
    let join = Bench::new(&merges).unwrap();
    close(&case, &join.run(&merges).unwrap()[0]).expect("the text as it is");
    let mutations: [Mutation; 8] = [
        ("attend", "v_table[i] = v_levels[i];\nTM_BARRIER();", "v_table[i] = v_levels[i];"),
        (
            "attend",
            "joined[simd * 32 + lane] = acc[g].at[i] * own;\n    TM_BARRIER();",
            "joined[simd * 32 + lane] = acc[g].at[i] * own;",
        ),
        ("attend", "    }\n    TM_BARRIER();\n  }\n}", "    }\n  }\n}"),
        (
            "attend",
            "for (int t = begin + stripe; t < end; t += stripes)",
            "for (int t = begin + stripe; t <= end; t += stripes)",
        ),
        (
            "attend",
            "const float own = top[g] == -TM_INF ? 0.0f : tm_exp(top[g] - highest);",
            "const float own = 1.0f;",
        ),
        (
            "attend",
            "place[4] + 1 - window > pad ? place[4] + 1 - window : pad;\nconst int most",
            "place[4] - window > pad ? place[4] + 2 - window : pad;\nconst int most",
        ),
        ("common", "RING - wrapped, wrapped)", "RING - wrapped - 1, wrapped)"),
        ("common", "((run[i + 1] << 1) << (31u - shift))", "(run[i + 1] << (31u - shift))"),
    ];
    for mutation in mutations {
        let outcome = broken(&calls, mutation).unwrap().run(&calls).and_then(|parts| {
            let merges = [merge_call(&case, &parts[0], Element::F32, true)];
            close(&case, &join.run(&merges)?[0])
        });
        assert!(outcome.is_err(), "no test sees this change: {mutation:?}");
    }
    let mutations: [Mutation; 2] = [
        (
            "merge",
            "if (lane == 0) best[simd] = highest;\nTM_BARRIER();",
            "if (lane == 0) best[simd] = highest;",
        ),
        ("merge", "tm_exp(state[at] - highest);", "tm_exp(state[at + 1] - highest);"),
    ];
    for mutation in mutations {
        let outcome = broken(&merges, mutation).unwrap().run(&merges).and_then(|m| close(&case, &m[0]));
        assert!(outcome.is_err(), "no test sees this change: {mutation:?}");
    }
}

#[test]
fn broken_encoders_fail() {
    let scalar = encoding::case(CodecSpec::new(80, 3, Grid::Beta), [1, 2, 6], 1, |_| {});
    let trellis = encoding::case(CodecSpec::new(128, 2, Grid::Trellis { states: 8 }), [1, 1, 3], 2, |_| {});
    let trial = |case: &encoding::Case, mutation: Option<Mutation>| {
        let calls = [case.call.clone()];
        let bench = match mutation {
            Some(mutation) => broken(&calls, mutation),
            None => Bench::new(&calls),
        }?;
        Some(bench.run(&calls).and_then(|out| encoding::close(case, &out[0])))
    };
    for case in [&scalar, &trellis] {
        let Some(outcome) = trial(case, None) else { return };
        outcome.expect("the text as it is");
    }
    let mutations: [(&encoding::Case, Mutation); 8] = [
        (&scalar, ("common", "total += scratch[i];\n  TM_BARRIER();", "total += scratch[i];")),
        (
            &scalar,
            (
                "common",
                "const float entry = factor[tid / RUN * ORDER + j];",
                "const float entry = factor[j * ORDER + tid / RUN];",
            ),
        ),
        (
            &scalar,
            ("encode", "if (u >= borders[next - 1u]) code = next;", "if (u >= borders[next]) code = next;"),
        ),
        (&scalar, ("encode", "codes[i] >> -shift", "codes[i] >> (1 - shift)")),
        (
            &trellis,
            (
                "common",
                "TM_BARRIER();\n    if (tid < DIM) {\n      const float other",
                "if (tid < DIM) {\n      const float other",
            ),
        ),
        (
            &trellis,
            (
                "encode_trellis",
                "if (lane == 0) leasts[simd] = least;\n      TM_BARRIER();",
                "if (lane == 0) leasts[simd] = least;",
            ),
        ),
        (&trellis, ("encode_trellis", "= word;\n    }\n    TM_BARRIER();", "= word;\n    }")),
        (
            &trellis,
            (
                "encode_trellis",
                "const int kept = round == 0 ? LEAD - 1 : 0;",
                "const int kept = round == 0 ? LEAD : 0;",
            ),
        ),
    ];
    for (case, mutation) in mutations {
        let outcome = trial(case, Some(mutation)).unwrap();
        assert!(outcome.is_err(), "no test sees this change: {mutation:?}");
    }
}
