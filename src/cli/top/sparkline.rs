//! Sparklines of a policy's last hour.

/// Minutes per character of a sparkline.
const MINUTES_PER_GLYPH: usize = 3;

/// Character set of a sparkline. Its first character means no requests, its second requests without
/// refusals, and its other characters increasing numbers of refusals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SparklineGlyphs {
    #[default]
    Ascii,
    Blocks,
}

impl SparklineGlyphs {
    /// Chooses block characters if the locale uses UTF-8.
    pub(super) fn from_locale() -> Self {
        let named = ["LC_ALL", "LC_CTYPE", "LANG"]
            .into_iter()
            .filter_map(|name| std::env::var(name).ok());
        let locale = named
            .into_iter()
            .find(|value| !value.is_empty())
            .unwrap_or_default()
            .to_ascii_lowercase();
        match locale.contains("utf-8") || locale.contains("utf8") {
            true => Self::Blocks,
            false => Self::Ascii,
        }
    }

    fn glyphs_by_height(self) -> [char; 9] {
        match self {
            Self::Ascii => [' ', '.', ':', '-', '=', '+', '*', '#', '@'],
            Self::Blocks => [' ', '·', '▁', '▂', '▃', '▄', '▅', '▆', '█'],
        }
    }
}

/// Renders the refusals of `minutes`, which holds all and refused requests by minute, oldest first.
pub(super) fn render_sparkline(minutes: &[(u64, u64)], glyphs: SparklineGlyphs) -> String {
    let groups: Vec<(u64, u64)> = minutes
        .chunks(MINUTES_PER_GLYPH)
        .map(|group| {
            group.iter().fold((0, 0), |(all, bad), (more, refused)| {
                (all + more, bad + refused)
            })
        })
        .collect();
    let most = groups
        .iter()
        .map(|(_, refused)| *refused)
        .max()
        .unwrap_or_default()
        .max(1);
    let ramp = glyphs.glyphs_by_height();
    let heights = ramp.len() as u64 - 2;
    let letter = |(all, refused): &(u64, u64)| {
        let at = match (all, refused) {
            (0, _) => 0,
            (_, 0) => 1,
            _ => 1 + (refused * heights).div_ceil(most),
        };
        usize::try_from(at)
            .ok()
            .and_then(|at| ramp.get(at))
            .copied()
            .unwrap_or(' ')
    };
    groups.iter().map(letter).collect()
}
