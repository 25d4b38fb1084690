//! What `eval` gives out: a Markdown table, JSON rows, and a plot of KL against stored bits.

use crate::Result;
use crate::eval::Row;
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use plotters::prelude::*;
use std::path::Path;

const SIZE: (u32, u32) = (960, 600);

/// A Markdown table.
pub fn markdown(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header([
        "recipe",
        "text",
        "ctx",
        "KL mean",
        "of windows",
        "KL median",
        "KL p99",
        "same top-1 %",
        "perplexity",
        "logits",
        "bits/value",
        "bytes/token",
        "ms/token",
    ]);
    for row in rows {
        table.add_row([
            row.recipe.clone(),
            row.text.clone(),
            row.ctx.to_string(),
            format!("{:.5}", row.kl_mean),
            if row.windows > 1 { format!("{:.5}..{:.5}", row.kl_least, row.kl_most) } else { "-".into() },
            format!("{:.5}", row.kl_median),
            format!("{:.4}", row.kl_p99),
            format!("{:.2}", 100.0 * row.same_top1),
            format!("{:.3}", row.ppl),
            row.logit_correlation.map_or("-".into(), |x| format!("{x:.4}")),
            row.bits_per_value.map_or("-".into(), |bits| format!("{bits:.3}")),
            format!("{:.0}", row.bytes_per_token),
            format!("{:.2}", row.ms_per_token),
        ]);
    }
    table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.to_string()
}

/// Draws mean KL, on a logarithmic axis, against stored bits per value: a colour for each text, a name for each point.
pub fn plot(rows: &[Row], path: &Path) -> Result<()> {
    let point = |row: &Row| Some((row.bits_per_value?, row.kl_mean)).filter(|point| point.1 > 0.0);
    let points: Vec<(f64, f64)> = rows.iter().filter_map(point).collect();
    if points.is_empty() {
        return Err("nothing to plot: no recipe packed any token".into());
    }
    let range = |f: fn(&(f64, f64)) -> f64| {
        let fold = |start, pick: fn(f64, f64) -> f64| points.iter().map(f).fold(start, pick);
        (fold(f64::INFINITY, f64::min), fold(f64::NEG_INFINITY, f64::max))
    };
    let (bits, kl) = (range(|p| p.0), range(|p| p.1));
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("KL against the float cache, nats a token", ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(bits.0 - 0.25..bits.1 + 1.0, (kl.0 / 2.0..kl.1 * 2.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("stored bits per value")
        .y_desc("mean KL")
        .y_label_formatter(&|kl| format!("{kl:.0e}"))
        .draw()?;
    let mut texts: Vec<&str> = rows.iter().map(|row| row.text.as_str()).collect();
    texts.dedup();
    for (i, text) in texts.into_iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        let rows = rows.iter().filter(|row| row.text == text);
        let marks = rows.filter_map(|row| Some((row, point(row)?))).map(|(row, at)| {
            let name = Text::new(row.recipe.clone(), (7, -5), ("sans-serif", 11).into_font());
            EmptyElement::at(at) + Circle::new((0, 0), 4, color.filled()) + name
        });
        let series = chart.draw_series(marks)?.label(text);
        series.legend(move |(x, y)| Circle::new((x + 8, y), 4, color.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .border_style(BLACK)
        .background_style(WHITE)
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
}
