//! Broken texts must fail: a barrier taken away, an index moved, a bound shifted. What no test would notice proves nothing.

use super::attention::{self, ONE, Rules, Side, close, merge_call};
use super::bench::{Bench, Call};
use super::encoding;
use turbomoq::internals::engine::mlx::kernels::plan::{ElementType, Pass};
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

/// Two query tokens, so that four simdgroups share a stretch of tokens, and nine, one more than a threadgroup has simdgroups.
fn cases() -> [attention::Case; 2] {
    let spec = CodecSpec::new(80, 3, Grid::Trellis { states: 8 });
    let (k, v) = (
        Side::packed(spec, [2, 1, 137], 1),
        Side::packed(CodecSpec::new(64, 5, Grid::Uniform), [2, 1, 137], 2),
    );
    [2, 9].map(|queries| {
        let pass = Pass {
            batch: 2,
            group: 3,
            queries,
            tokens: 137,
            position: 127,
            window: 120,
            causal: true,
            ..ONE
        };
        attention::case(&k, &v, &Rules { pass, first: vec![0, 9], cap: 0.0, sparse: 0.0 }, 3)
    })
}

fn joins(cases: &[attention::Case], parts: &[Vec<Vec<u8>>]) -> Vec<Call> {
    cases.iter().zip(parts).map(|(case, parts)| merge_call(case, parts, ElementType::F32, true)).collect()
}

fn all_close(cases: &[attention::Case], merged: &[Vec<Vec<u8>>]) -> Result<(), String> {
    cases.iter().zip(merged).try_for_each(|(case, merged)| close(case, merged))
}

#[test]
fn broken_attention_fails() {
    let cases = cases();
    let calls = [cases[0].call.clone(), cases[1].call.clone()];
    let Some(bench) = Bench::new(&calls) else { return };
    let merges = joins(&cases, &bench.run(&calls).unwrap());
    let join = Bench::new(&merges).unwrap();
    all_close(&cases, &join.run(&merges).unwrap()).expect("the text as it is");
    let mutations: [Mutation; 14] = [
        ("attend", "own_thread, threads);\nTM_BARRIER();", "own_thread, threads);"),
        (
            "attend",
            "    }\n    TM_BARRIER();\n    TM_LOOP\n    for (int i = stripe;",
            "    }\n    TM_LOOP\n    for (int i = stripe;",
        ),
        ("attend", "    }\n    TM_BARRIER();\n  }\n}", "    }\n  }\n}"),
        ("attend", "rules.end = used ? end : 0;", "rules.end = used ? end + 1 : 0;"),
        (
            "attend",
            "const float own = top == -TM_INF ? 0.0f : tm_exp(top - highest);",
            "const float own = top == -TM_INF ? 0.0f : 1.0f;",
        ),
        (
            "attend",
            "place[4] + 1 - window > pad ? place[4] + 1 - window : pad;\nconst int most",
            "place[4] - window > pad ? place[4] + 2 - window : pad;\nconst int most",
        ),
        ("attend", "const int own = g ^ (lane % HEADS);", "const int own = g;"),
        ("attend", "const bool used = number < length * chunks;", "const bool used = true;"),
        ("common", "place.seam = uint(SEAM);", "place.seam = uint(SEAM - 1);"),
        ("common", "(1u << (BITS - 1) << power)", "(1u << (BITS - 1))"),
        ("common", "return (upper ? odd : even) +", "return (upper ? even : odd) +"),
        ("common", "score = own > last ||", "score ="),
        ("common", "if (more) open[STEPS] = carry;", "open[STEPS] = carry; open[STEPS - 1] = carry;"),
        ("common", "const float f = tm_shuffle(factor, g);", "const float f = factor;"),
    ];
    for mutation in mutations {
        let outcome = broken(&calls, mutation)
            .unwrap()
            .run(&calls)
            .and_then(|parts| all_close(&cases, &join.run(&joins(&cases, &parts))?));
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
        let outcome = broken(&merges, mutation).unwrap().run(&merges).and_then(|m| all_close(&cases, &m));
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
