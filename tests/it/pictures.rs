//! The pictures of `docs/ALGORITHMS.md`: the real algorithms, in the memory store under a manual clock, against one
//! fixed demand. `make pictures` draws them anew; otherwise what is in `docs/img/` has to be what would be drawn.

use crate::support::judge::{Judge, START_US};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use tidegate::limiter::{Algorithm, Amendment, Charge, KeyBuilder, Limit};

/// The demand, in ms: so many requests, from, to. The first two stand on both sides of a whole second; what follows
/// is half as much again as the limit; then a pause, a burst, and less than the limit.
const DEMAND: [(u64, u64, u64); 5] = [
    (25, 800, 950),
    (25, 1_020, 1_170),
    (60, 1_500, 3_500),
    (40, 4_650, 4_850),
    (18, 5_000, 6_500),
];
const SPAN_MS: u64 = 7_000;
const BIN_MS: u64 = 100;
const SECOND_US: u64 = 1_000_000;

/// One algorithm and what is to be seen of it.
struct Picture {
    name: &'static str,
    /// What stands beside `requests`, as it is written.
    written: &'static str,
    algorithm: Algorithm,
    /// What the blue bars are.
    passes: &'static str,
    below: &'static str,
    /// What is promised never to be passed, and in which words.
    bound: (u64, &'static str),
    /// The most that the lower half shows.
    most: u64,
    curves: &'static [(&'static str, Curve)],
}

/// A line of the lower half, by number of units.
type Curve = fn(&Run) -> Vec<(u64, u64)>;

const PICTURES: [Picture; 7] = [
    Picture {
        name: "sliding_log",
        written: r#"per = "1s", algorithm = "sliding_log""#,
        algorithm: Algorithm::SlidingLog,
        passes: "admitted",
        below: "units, seen from each moment",
        bound: (20, "the limit: 20 in any second"),
        most: 42,
        curves: &[("admitted in the last second", Run::last_second)],
    },
    Picture {
        name: "sliding_window",
        written: r#"per = "1s", algorithm = "sliding_window", buckets = 10"#,
        algorithm: Algorithm::SlidingWindow { buckets: 10 },
        passes: "admitted",
        below: "units, seen from each moment",
        bound: (20, "the limit: 20 in any second"),
        most: 42,
        curves: &[
            ("admitted in the last second", Run::last_second),
            ("what it counts: the oldest tenth whole", Run::used),
        ],
    },
    Picture {
        name: "fixed_window",
        written: r#"per = "1s", algorithm = "fixed_window""#,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
        passes: "admitted",
        below: "units, seen from each moment",
        bound: (20, "the limit: 20 in each second of the clock"),
        most: 42,
        curves: &[
            ("admitted in this second of the clock", Run::used),
            ("admitted in the last second", Run::last_second),
        ],
    },
    Picture {
        name: "token_bucket",
        written: r#"per = "1s", algorithm = "token_bucket", burst = 10"#,
        algorithm: Algorithm::TokenBucket {
            burst: 10,
            warm_up_us: 0,
        },
        passes: "admitted",
        below: "units, seen from each moment",
        bound: (30, "never more: burst + 20 in any second"),
        most: 42,
        curves: &[
            ("admitted in the last second", Run::last_second),
            ("left in the bucket", Run::left),
        ],
    },
    Picture {
        name: "warm_up",
        written: r#"per = "1s", algorithm = "token_bucket", burst = 10, warm_up = "1s""#,
        algorithm: Algorithm::TokenBucket {
            burst: 10,
            warm_up_us: SECOND_US,
        },
        passes: "admitted",
        below: "units, seen from each moment",
        bound: (30, "never more: burst + 20 in any second"),
        most: 42,
        curves: &[
            ("admitted in the last second", Run::last_second),
            ("left in the bucket", Run::left),
        ],
    },
    Picture {
        name: "leaky_bucket",
        written: r#"per = "1s", algorithm = "leaky_bucket", max_delay = "500ms""#,
        algorithm: Algorithm::LeakyBucket {
            max_delay_us: 500_000,
        },
        passes: "leave",
        below: "requests in line",
        bound: (10, "never more: max_delay · 20 per second"),
        most: 15,
        curves: &[("held, waiting for their turn", Run::held)],
    },
    Picture {
        name: "concurrency",
        written: r#"algorithm = "concurrency""#,
        algorithm: Algorithm::Concurrency { max_duration_us: 0 },
        passes: "admitted",
        below: "requests in flight, 800 ms each",
        bound: (20, "the limit: 20 at a time"),
        most: 25,
        curves: &[("in flight", Run::held)],
    },
];

/// How long the app of a request takes, where that matters.
const TAKES_US: u64 = 800_000;

/// What became of the demand; times in µs from the start.
#[derive(Default)]
struct Run {
    asked: Vec<u64>,
    /// When each admitted request came, and when it left: the line, or the app.
    passed: Vec<(u64, u64)>,
    /// Units in use and units left, at each moment of a fine grid.
    seen: Vec<(u64, u64, u64)>,
}

impl Run {
    fn of(algorithm: Algorithm) -> Self {
        let has_slots = matches!(algorithm, Algorithm::Concurrency { .. });
        let limit = Limit {
            requests: 20,
            per_us: 10 * SECOND_US,
            algorithm,
        };
        let limit = if has_slots {
            limit
        } else {
            Limit {
                per_us: SECOND_US,
                ..limit
            }
        };
        let (mut judge, mut run, key) = (
            Judge::memory(),
            Self::default(),
            KeyBuilder::new("p").finish(),
        );
        let charge = |cost| Charge::new(&limit, &key, cost);
        let arrivals = DEMAND.iter().flat_map(|(count, from_ms, to_ms)| {
            (0..*count).map(move |n| from_ms * 1_000 + n * (to_ms - from_ms) * 1_000 / count)
        });
        let mut arrivals = arrivals.peekable();
        let mut ended = 0;
        for now_us in (0..SPAN_MS * 1_000).step_by(10_000) {
            while let Some(at_us) = arrivals.next_if(|at_us| *at_us <= now_us) {
                while let Some((_, left_us)) = run
                    .passed
                    .get(ended)
                    .filter(|one| has_slots && one.1 <= at_us)
                {
                    let slot = ended as u128;
                    judge.amend(
                        &limit,
                        &key,
                        Amendment::Release { slot },
                        START_US + left_us,
                    );
                    ended += 1;
                }
                run.asked.push(at_us);
                let slot = run.passed.len() as u128;
                let decision = judge.decide(&[Charge { slot, ..charge(1) }], START_US + at_us);
                if decision.admitted {
                    let stays_us = if has_slots {
                        TAKES_US
                    } else {
                        decision.delay_us
                    };
                    run.passed.push((at_us, at_us + stays_us));
                }
            }
            let left = judge.decide(&[charge(0)], START_US + now_us).standings[0]
                .unwrap()
                .remaining;
            run.seen.push((now_us, limit.capacity() - left, left));
        }
        run
    }

    fn used(&self) -> Vec<(u64, u64)> {
        self.seen
            .iter()
            .map(|(at_us, used, _)| (*at_us, *used))
            .collect()
    }

    fn left(&self) -> Vec<(u64, u64)> {
        self.seen
            .iter()
            .map(|(at_us, _, left)| (*at_us, *left))
            .collect()
    }

    fn last_second(&self) -> Vec<(u64, u64)> {
        self.count(|(came_us, _), now_us| came_us <= now_us && came_us + SECOND_US > now_us)
    }

    fn held(&self) -> Vec<(u64, u64)> {
        self.count(|(came_us, left_us), now_us| came_us <= now_us && left_us > now_us)
    }

    fn count(&self, counts: impl Fn((u64, u64), u64) -> bool) -> Vec<(u64, u64)> {
        let at = |now_us| {
            self.passed
                .iter()
                .filter(|one| counts(**one, now_us))
                .count() as u64
        };
        self.seen
            .iter()
            .map(|(now_us, ..)| (*now_us, at(*now_us)))
            .collect()
    }
}

const WIDTH: u64 = 760;
const LEFT: u64 = 48;
const RIGHT: u64 = WIDTH - 20;
const STYLE: &str = "
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

impl Picture {
    fn draw(&self) -> String {
        let run = Run::of(self.algorithm);
        let (upper, lower) = (Panel::new(92, 120, 20), Panel::new(270, 120, self.most));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} 434\" width=\"{WIDTH}\" role=\"img\">\n\
             <title>{}: what it admits over time</title>\n<style>{STYLE}</style>\n\
             <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"433\" rx=\"6\"/>\n",
            self.name,
            WIDTH - 1,
        );
        let words = format!("requests = 20, {}", self.written);
        let tally = format!(
            "{} asked, {} {}",
            run.asked.len(),
            run.passed.len(),
            self.passes
        );
        let words = words.replace('"', "&quot;");
        text(&mut svg, (20, 32), "title", self.name);
        text(&mut svg, (20, 52), "code", &words);
        text(&mut svg, (RIGHT, 32), "end", &tally);

        upper.frame(&mut svg, &format!("requests per {BIN_MS} ms"), 10);
        upper.bars(&mut svg, "asked", 8, &run.asked);
        let goes = |(came_us, left_us): &(u64, u64)| {
            if self.passes == "leave" {
                *left_us
            } else {
                *came_us
            }
        };
        let leaves: Vec<u64> = run.passed.iter().map(goes).collect();
        upper.bars(&mut svg, "passed", 4, &leaves);
        legend(
            &mut svg,
            upper.top - 10,
            &[("asked", "asked"), ("passed", self.passes)],
        );

        lower.frame(&mut svg, self.below, if self.most < 20 { 5 } else { 10 });
        let mut words = Vec::new();
        for ((word, curve), class) in self.curves.iter().zip(["one", "two"]) {
            lower.line(&mut svg, class, &curve(&run));
            words.push((class, *word));
        }
        lower.bound(&mut svg, self.bound);
        legend(&mut svg, lower.top - 10, &words);
        svg + "</svg>\n"
    }
}

/// One half of a picture: time to the right, an amount upwards.
struct Panel {
    top: u64,
    height: u64,
    most: u64,
}

impl Panel {
    fn new(top: u64, height: u64, most: u64) -> Self {
        Self { top, height, most }
    }

    fn y(&self, amount: u64) -> f64 {
        (self.top + self.height) as f64
            - (amount.min(self.most) * self.height) as f64 / self.most as f64
    }

    fn frame(&self, svg: &mut String, title: &str, each: u64) {
        let bottom = self.top + self.height;
        text(svg, (20, self.top - 10), "", title);
        for amount in (0..=self.most).step_by(each as usize) {
            let (y, class) = (self.y(amount), if amount == 0 { "axis" } else { "grid" });
            line(svg, class, (LEFT as f64, y), (RIGHT as f64, y));
            text(svg, (LEFT - 6, y as u64 + 4), "end", &amount.to_string());
        }
        for second in 0..=SPAN_MS / 1_000 {
            let x = x(second * SECOND_US);
            line(svg, "axis", (x, bottom as f64), (x, bottom as f64 + 4.0));
            text(
                svg,
                (x as u64, bottom + 18),
                "middle",
                &format!("{second} s"),
            );
        }
    }

    fn bars(&self, svg: &mut String, class: &str, width: u64, times_us: &[u64]) {
        write!(svg, "<g class=\"{class}\">").unwrap();
        for bin in 0..SPAN_MS / BIN_MS {
            let amount = times_us
                .iter()
                .filter(|at_us| **at_us / 1_000 / BIN_MS == bin)
                .count() as u64;
            if amount > 0 {
                let middle = x((2 * bin + 1) * BIN_MS * 500);
                let (left, top) = (middle - width as f64 / 2.0, self.y(amount));
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

    /// In steps: an amount holds until it changes.
    fn line(&self, svg: &mut String, class: &str, points: &[(u64, u64)]) {
        write!(
            svg,
            "<path class=\"{class}\" d=\"M{LEFT} {:.1}",
            self.y(points[0].1)
        )
        .unwrap();
        for pair in points.windows(2).filter(|pair| pair[0].1 != pair[1].1) {
            write!(svg, "H{:.1}V{:.1}", x(pair[1].0), self.y(pair[1].1)).unwrap();
        }
        writeln!(svg, "H{RIGHT}\"/>").unwrap();
    }

    fn bound(&self, svg: &mut String, (amount, words): (u64, &str)) {
        let y = self.y(amount);
        writeln!(svg, "<path class=\"bound\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>").unwrap();
        // Where no curve passes a bound.
        text(svg, (x(4_450_000) as u64, y as u64 - 5), "end word", words);
    }
}

fn x(at_us: u64) -> f64 {
    LEFT as f64 + (at_us * (RIGHT - LEFT)) as f64 / (SPAN_MS * 1_000) as f64
}

fn text(svg: &mut String, (x, y): (u64, u64), class: &str, words: &str) {
    let class = if class.is_empty() {
        String::new()
    } else {
        format!(" class=\"{class}\"")
    };
    writeln!(svg, "<text x=\"{x}\" y=\"{y}\"{class}>{words}</text>").unwrap();
}

fn line(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    )
    .unwrap();
}

/// From the right: a sign and its words each.
fn legend(svg: &mut String, y: u64, entries: &[(&str, &str)]) {
    let mut right = RIGHT;
    for (class, words) in entries.iter().rev() {
        // About as wide as the words will be.
        let start = right - words.chars().count() as u64 * 13 / 2;
        text(svg, (start, y), "", words);
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
fn the_pictures_show_what_the_algorithms_do() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/img");
    let page = fs::read_to_string(folder.with_file_name("ALGORITHMS.md")).unwrap();
    let mut wrong = Vec::new();
    for picture in &PICTURES {
        let (file, drawn) = (folder.join(format!("{}.svg", picture.name)), picture.draw());
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
        "{wrong:?}: not as drawn now, or not in ALGORITHMS.md: run `make pictures` and look"
    );
}
