//! The times of `turbomoq bench` as a chart: milliseconds over tokens, both axes logarithmic.

use plotters::prelude::*;
use std::path::Path;
use turbomoq::{Error, Result};

const SIZE: (u32, u32) = (960, 600);

/// Draws series of (name, tokens, milliseconds); points of a name are one line.
pub fn draw(path: &Path, points: &[(String, usize, f64)]) -> Result<()> {
    let problem = |e: &dyn std::fmt::Display| Error::Io {
        path: path.into(),
        source: std::io::Error::other(e.to_string()),
    };
    let mut names: Vec<&String> = vec![];
    for (name, _, _) in points {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let bounds = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values.fold((f64::INFINITY, 0f64), |(l, h), x| (l.min(x), h.max(x)));
        low / 1.3..high * 1.3
    };
    let x = bounds(&mut points.iter().map(|p| p.1 as f64));
    let y = bounds(&mut points.iter().map(|p| p.2));
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(|e| problem(&e))?;
    let mut chart = ChartBuilder::on(&area)
        .caption("One decode step of attention", ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(x.log_scale(), y.log_scale())
        .map_err(|e| problem(&e))?;
    chart
        .configure_mesh()
        .x_desc("tokens")
        .y_desc("ms")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()
        .map_err(|e| problem(&e))?;
    for (i, name) in names.into_iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        let line = points.iter().filter(|p| p.0 == *name).map(|p| (p.1 as f64, p.2));
        chart
            .draw_series(LineSeries::new(line, color.stroke_width(2)).point_size(3))
            .map_err(|e| problem(&e))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
        .map_err(|e| problem(&e))?;
    area.present().map_err(|e| problem(&e))
}
