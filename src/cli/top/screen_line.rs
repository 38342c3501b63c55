//! A line of the screen and its style.

/// Style of a line. The text of a line has the same meaning without the style, for terminals
/// without colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LineStyle {
    #[default]
    Plain,
    Title,
    TableHeader,
    Alert,
    Warning,
    Good,
    Dim,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScreenLine {
    pub(super) style: LineStyle,
    /// Printable text; each character is one column wide.
    pub(super) text: String,
}

impl ScreenLine {
    pub(super) fn plain(text: String) -> Self {
        Self {
            style: LineStyle::Plain,
            text,
        }
    }

    pub(super) fn dim(text: String) -> Self {
        Self {
            style: LineStyle::Dim,
            text,
        }
    }

    pub(super) fn alert(text: String) -> Self {
        Self {
            style: LineStyle::Alert,
            text,
        }
    }
}
