//! The charts of `docs/ALGORITHMS.md`: the real algorithms, in the memory store under a manual
//! clock, with one fixed demand. `make pictures` redraws them. Otherwise the test requires
//! `docs/img/` to match the drawing.

use crate::support::prelude::*;
use std::fmt::Write as _;

/// The demand: number of requests, start and end in ms. The first two bursts lie on both sides of a
/// whole second. The third is 1.5 times the limit. A pause, a burst, and a rate below the limit
/// follow.
const DEMAND: [(u64, u64, u64); 5] = [
    (25, 800, 950),
    (25, 1_020, 1_170),
    (60, 1_500, 3_500),
    (40, 4_650, 4_850),
    (18, 5_000, 6_500),
];
const PLOT_LENGTH_MS: u64 = 7_000;
const BIN_MS: u64 = 100;
const SECOND_US: u64 = 1_000_000;

/// The chart of one algorithm.
struct AlgorithmPlot {
    name: &'static str,
    /// The parameters beside `requests`, as in the configuration.
    parameters: &'static str,
    algorithm: Algorithm,
    /// The legend of the blue bars.
    passed_label: &'static str,
    lower_title: &'static str,
    /// The promised upper bound, and its label.
    bound: (u64, &'static str),
    /// The upper end of the lower panel's axis.
    lower_max: u64,
    curves: &'static [(&'static str, CurveFunction)],
}

/// A curve of the lower panel: time and number of units.
type CurveFunction = fn(&SimulationRun) -> Vec<(u64, u64)>;

const IN_LAST_SECOND: (&str, CurveFunction) = (
    "admitted in the last second",
    SimulationRun::units_in_last_second,
);
const LEFT_IN_BUCKET: (&str, CurveFunction) =
    ("left in the bucket", SimulationRun::remaining_units);

/// A plot of units that are admitted at once.
const ADMITTED_AT_ONCE: AlgorithmPlot = AlgorithmPlot {
    name: "",
    parameters: "",
    algorithm: Algorithm::SlidingLog,
    passed_label: "admitted",
    lower_title: "units, seen from each moment",
    bound: (20, "the limit: 20 in any second"),
    lower_max: 42,
    curves: &[],
};

const ALGORITHM_PLOTS: [AlgorithmPlot; 7] = [
    AlgorithmPlot {
        name: "sliding_log",
        parameters: r#"per = "1s", algorithm = "sliding_log""#,
        algorithm: Algorithm::SlidingLog,
        curves: &[IN_LAST_SECOND],
        ..ADMITTED_AT_ONCE
    },
    AlgorithmPlot {
        name: "sliding_window",
        parameters: r#"per = "1s", algorithm = "sliding_window", buckets = 10"#,
        algorithm: Algorithm::SlidingWindow { buckets: 10 },
        curves: &[
            IN_LAST_SECOND,
            (
                "what it counts: the oldest tenth whole",
                SimulationRun::used_units,
            ),
        ],
        ..ADMITTED_AT_ONCE
    },
    AlgorithmPlot {
        name: "fixed_window",
        parameters: r#"per = "1s", algorithm = "fixed_window""#,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
        bound: (20, "the limit: 20 in each second of the clock"),
        curves: &[
            (
                "admitted in this second of the clock",
                SimulationRun::used_units,
            ),
            IN_LAST_SECOND,
        ],
        ..ADMITTED_AT_ONCE
    },
    AlgorithmPlot {
        name: "token_bucket",
        parameters: r#"per = "1s", algorithm = "token_bucket", burst = 10"#,
        algorithm: plain_bucket(10),
        bound: (30, "never more: burst + 20 in any second"),
        curves: &[IN_LAST_SECOND, LEFT_IN_BUCKET],
        ..ADMITTED_AT_ONCE
    },
    AlgorithmPlot {
        name: "warm_up",
        parameters: r#"per = "1s", algorithm = "token_bucket", burst = 10, warm_up = "1s""#,
        algorithm: Algorithm::TokenBucket {
            burst: 10,
            warm_up_us: SECOND_US,
        },
        bound: (30, "never more: burst + 20 in any second"),
        curves: &[IN_LAST_SECOND, LEFT_IN_BUCKET],
        ..ADMITTED_AT_ONCE
    },
    AlgorithmPlot {
        name: "leaky_bucket",
        parameters: r#"per = "1s", algorithm = "leaky_bucket", max_delay = "500ms""#,
        algorithm: Algorithm::LeakyBucket {
            max_delay_us: 500_000,
        },
        passed_label: "leave",
        lower_title: "requests in line",
        bound: (10, "never more: max_delay · 20 per second"),
        lower_max: 15,
        curves: &[("held, waiting for their turn", SimulationRun::requests_held)],
    },
    AlgorithmPlot {
        name: "concurrency",
        parameters: r#"algorithm = "concurrency""#,
        algorithm: Algorithm::Concurrency { max_duration_us: 0 },
        passed_label: "admitted",
        lower_title: "requests in flight, 800 ms each",
        bound: (20, "the limit: 20 at a time"),
        lower_max: 25,
        curves: &[("in flight", SimulationRun::requests_held)],
    },
];

/// How long the upstream takes for a request, where it matters.
const SERVICE_TIME_US: u64 = 800_000;

/// The result of a simulation. Times are in µs from the start.
#[derive(Default)]
struct SimulationRun {
    arrivals_us: Vec<u64>,
    /// Arrival and departure of each admitted request: departure from the queue, or from the
    /// upstream.
    admitted: Vec<(u64, u64)>,
    /// Time, units in use and units left, at each point of a fine grid.
    samples: Vec<(u64, u64, u64)>,
}

impl SimulationRun {
    fn simulate(algorithm: Algorithm) -> Self {
        let has_slots = matches!(algorithm, Algorithm::Concurrency { .. });
        let limit = make_limit(20, 10 * SECOND_US, algorithm);
        let limit = if has_slots {
            limit
        } else {
            Limit {
                per_us: SECOND_US,
                ..limit
            }
        };
        let (mut memory_store, mut run, key) = (
            StoreUnderTest::memory(),
            Self::default(),
            KeyBuilder::new("p").finish(),
        );
        let charge = |cost| PolicyCharges::new(&limit, &key, cost);
        let arrivals = DEMAND.iter().flat_map(|(count, from_ms, to_ms)| {
            (0..*count).map(move |n| from_ms * 1_000 + n * (to_ms - from_ms) * 1_000 / count)
        });
        let mut arrivals = arrivals.peekable();
        let mut ended = 0;
        for now_us in (0..PLOT_LENGTH_MS * 1_000).step_by(10_000) {
            while let Some(at_us) = arrivals.next_if(|at_us| *at_us <= now_us) {
                while let Some((_, left_us)) = run
                    .admitted
                    .get(ended)
                    .filter(|one| has_slots && one.1 <= at_us)
                {
                    let slot = ended as u128;
                    memory_store.apply_amendment(
                        &limit,
                        &key,
                        Amendment::Release { slot },
                        START_US + left_us,
                    );
                    ended += 1;
                }
                run.arrivals_us.push(at_us);
                let slot = run.admitted.len() as u128;
                let decision = memory_store.decide(
                    &[PolicyCharges {
                        slot_id: slot,
                        ..charge(1)
                    }],
                    START_US + at_us,
                );
                if decision.admitted {
                    let stays_us = if has_slots {
                        SERVICE_TIME_US
                    } else {
                        decision.delay_us
                    };
                    run.admitted.push((at_us, at_us + stays_us));
                }
            }
            let left = memory_store
                .decide(&[charge(0)], START_US + now_us)
                .statuses()
                .next()
                .unwrap()
                .remaining;
            run.samples.push((now_us, limit.capacity() - left, left));
        }
        run
    }

    fn used_units(&self) -> Vec<(u64, u64)> {
        self.samples
            .iter()
            .map(|(at_us, used, _)| (*at_us, *used))
            .collect()
    }

    fn remaining_units(&self) -> Vec<(u64, u64)> {
        self.samples
            .iter()
            .map(|(at_us, _, left)| (*at_us, *left))
            .collect()
    }

    fn units_in_last_second(&self) -> Vec<(u64, u64)> {
        self.count_at_samples(|(came_us, _), now_us| {
            came_us <= now_us && came_us + SECOND_US > now_us
        })
    }

    fn requests_held(&self) -> Vec<(u64, u64)> {
        self.count_at_samples(|(came_us, left_us), now_us| came_us <= now_us && left_us > now_us)
    }

    fn count_at_samples(&self, counts: impl Fn((u64, u64), u64) -> bool) -> Vec<(u64, u64)> {
        let at = |now_us| {
            self.admitted
                .iter()
                .filter(|one| counts(**one, now_us))
                .count() as u64
        };
        self.samples
            .iter()
            .map(|(now_us, ..)| (*now_us, at(*now_us)))
            .collect()
    }
}

const SVG_WIDTH: u64 = 760;
const PLOT_LEFT: u64 = 48;
const PLOT_RIGHT: u64 = SVG_WIDTH - 20;
const SVG_STYLE: &str = "
  .card{fill:#fff;stroke:#d0d7de}text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#57606a}
  .title{font-size:15px;font-weight:600;fill:#1f2328}.code{font-family:ui-monospace,Menlo,Consolas,monospace}
  .end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#eaeef2}.axis{stroke:#8c959f}
  .asked{fill:#ccd3da}.passed{fill:#0969da}path{fill:none;stroke-width:2;stroke-linejoin:round}
  .one{stroke:#0969da}.two{stroke:#8250df;stroke-dasharray:5 3}
  .bound{stroke:#bc4c00;stroke-width:1.5;stroke-dasharray:7 4}.word{fill:#bc4c00}
  @media(prefers-color-scheme:dark){.card{fill:#0d1117;stroke:#30363d}text{fill:#9198a1}.title{fill:#f0f6fc}
  .grid{stroke:#21262d}.axis{stroke:#6e7681}.asked{fill:#3d444d}.passed{fill:#4493f8}.one{stroke:#4493f8}
  .two{stroke:#ab7df8}.bound{stroke:#f0883e}.word{fill:#f0883e}}
";

impl AlgorithmPlot {
    fn render_svg(&self) -> String {
        let run = SimulationRun::simulate(self.algorithm);
        let (upper, lower) = (
            PlotPanel::new(92, 120, 20),
            PlotPanel::new(270, 120, self.lower_max),
        );
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {SVG_WIDTH} 434\" width=\"{SVG_WIDTH}\" role=\"img\">\n\
             <title>{}: what it admits over time</title>\n<style>{SVG_STYLE}</style>\n\
             <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"433\" rx=\"6\"/>\n",
            self.name,
            SVG_WIDTH - 1,
        );
        let words = format!("requests = 20, {}", self.parameters);
        let tally = format!(
            "{} asked, {} {}",
            run.arrivals_us.len(),
            run.admitted.len(),
            self.passed_label
        );
        let words = words.replace('"', "&quot;");
        draw_text(&mut svg, (20, 32), "title", self.name);
        draw_text(&mut svg, (20, 52), "code", &words);
        draw_text(&mut svg, (PLOT_RIGHT, 32), "end", &tally);

        upper.draw_frame(&mut svg, &format!("requests per {BIN_MS} ms"), 10);
        upper.draw_bars(&mut svg, "asked", 8, &run.arrivals_us);
        let goes = |(came_us, left_us): &(u64, u64)| {
            if self.passed_label == "leave" {
                *left_us
            } else {
                *came_us
            }
        };
        let leaves: Vec<u64> = run.admitted.iter().map(goes).collect();
        upper.draw_bars(&mut svg, "passed", 4, &leaves);
        draw_legend(
            &mut svg,
            upper.top - 10,
            &[("asked", "asked"), ("passed", self.passed_label)],
        );

        lower.draw_frame(
            &mut svg,
            self.lower_title,
            if self.lower_max < 20 { 5 } else { 10 },
        );
        let mut words = Vec::new();
        for ((word, curve), class) in self.curves.iter().zip(["one", "two"]) {
            lower.draw_step_line(&mut svg, class, &curve(&run));
            words.push((class, *word));
        }
        lower.draw_bound(&mut svg, self.bound);
        draw_legend(&mut svg, lower.top - 10, &words);
        svg + "</svg>\n"
    }
}

/// One panel of a chart: time to the right, an amount upwards.
struct PlotPanel {
    top: u64,
    height: u64,
    max_amount: u64,
}

impl PlotPanel {
    fn new(top: u64, height: u64, most: u64) -> Self {
        Self {
            top,
            height,
            max_amount: most,
        }
    }

    fn y_position(&self, amount: u64) -> f64 {
        (self.top + self.height) as f64
            - (amount.min(self.max_amount) * self.height) as f64 / self.max_amount as f64
    }

    fn draw_frame(&self, svg: &mut String, title: &str, each: u64) {
        let bottom = self.top + self.height;
        draw_text(svg, (20, self.top - 10), "", title);
        for amount in (0..=self.max_amount).step_by(each as usize) {
            let (y, class) = (
                self.y_position(amount),
                if amount == 0 { "axis" } else { "grid" },
            );
            draw_line(svg, class, (PLOT_LEFT as f64, y), (PLOT_RIGHT as f64, y));
            draw_text(
                svg,
                (PLOT_LEFT - 6, y as u64 + 4),
                "end",
                &amount.to_string(),
            );
        }
        for second in 0..=PLOT_LENGTH_MS / 1_000 {
            let x = x_position(second * SECOND_US);
            draw_line(svg, "axis", (x, bottom as f64), (x, bottom as f64 + 4.0));
            draw_text(
                svg,
                (x as u64, bottom + 18),
                "middle",
                &format!("{second} s"),
            );
        }
    }

    fn draw_bars(&self, svg: &mut String, class: &str, width: u64, times_us: &[u64]) {
        write!(svg, "<g class=\"{class}\">").unwrap();
        for bin in 0..PLOT_LENGTH_MS / BIN_MS {
            let amount = times_us
                .iter()
                .filter(|at_us| **at_us / 1_000 / BIN_MS == bin)
                .count() as u64;
            if amount > 0 {
                let middle = x_position((2 * bin + 1) * BIN_MS * 500);
                let (left, top) = (middle - width as f64 / 2.0, self.y_position(amount));
                let height = (self.top + self.height) as f64 - top;
                write!(
                    svg,
                    "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width}\" height=\"{height:.1}\"/>"
                )
                .unwrap();
            }
        }
        svg.push_str("</g>\n");
    }

    /// Draws steps: an amount holds until it changes.
    fn draw_step_line(&self, svg: &mut String, class: &str, points: &[(u64, u64)]) {
        write!(
            svg,
            "<path class=\"{class}\" d=\"M{PLOT_LEFT} {:.1}",
            self.y_position(points[0].1)
        )
        .unwrap();
        for pair in points.windows(2).filter(|pair| pair[0].1 != pair[1].1) {
            write!(
                svg,
                "H{:.1}V{:.1}",
                x_position(pair[1].0),
                self.y_position(pair[1].1)
            )
            .unwrap();
        }
        writeln!(svg, "H{PLOT_RIGHT}\"/>").unwrap();
    }

    fn draw_bound(&self, svg: &mut String, (amount, words): (u64, &str)) {
        let y = self.y_position(amount);
        writeln!(
            svg,
            "<path class=\"bound\" d=\"M{PLOT_LEFT} {y:.1}H{PLOT_RIGHT}\"/>"
        )
        .unwrap();
        // Where no curve crosses a bound.
        draw_text(
            svg,
            (x_position(4_450_000) as u64, y as u64 - 5),
            "end word",
            words,
        );
    }
}

fn x_position(at_us: u64) -> f64 {
    PLOT_LEFT as f64 + (at_us * (PLOT_RIGHT - PLOT_LEFT)) as f64 / (PLOT_LENGTH_MS * 1_000) as f64
}

fn draw_text(svg: &mut String, (x, y): (u64, u64), class: &str, words: &str) {
    let class = if class.is_empty() {
        String::new()
    } else {
        format!(" class=\"{class}\"")
    };
    writeln!(svg, "<text x=\"{x}\" y=\"{y}\"{class}>{words}</text>").unwrap();
}

fn draw_line(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    )
    .unwrap();
}

/// Draws the legend from the right: a symbol and its label for each entry.
fn draw_legend(svg: &mut String, y: u64, entries: &[(&str, &str)]) {
    let mut right = PLOT_RIGHT;
    for (class, words) in entries.iter().rev() {
        // The approximate width of the label.
        let start = right - words.chars().count() as u64 * 13 / 2;
        draw_text(svg, (start, y), "", words);
        let (sign, top) = (start - 24, y - 4);
        match *class {
            "asked" | "passed" => {
                let (x, y) = (start - 14, y - 9);
                writeln!(
                    svg,
                    "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"8\" height=\"10\"/>"
                )
            }
            _ => writeln!(svg, "<path class=\"{class}\" d=\"M{sign} {top}h18\"/>"),
        }
        .unwrap();
        right = sign - 14;
    }
}

#[test]
fn the_committed_plots_match_the_algorithms() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/img");
    let page = fs::read_to_string(folder.with_file_name("ALGORITHMS.md")).unwrap();
    let mut wrong = Vec::new();
    for picture in &ALGORITHM_PLOTS {
        let (file, drawn) = (
            folder.join(format!("{}.svg", picture.name)),
            picture.render_svg(),
        );
        if std::env::var_os("UPDATE_FIXTURES").is_some() {
            fs::write(&file, &drawn).unwrap();
        }
        let kept = fs::read_to_string(&file).unwrap_or_default();
        if kept != drawn || !page.contains(&format!("(img/{}.svg)", picture.name)) {
            wrong.push(picture.name);
        }
    }
    assert!(
        wrong.is_empty(),
        "{wrong:?}: outdated, or not in ALGORITHMS.md: run `make pictures` and review the charts"
    );
}
