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

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ScreenLine {
    pub(super) style: LineStyle,
    /// Printable text; each character is one column wide.
    pub(super) text: String,
}

impl ScreenLine {
    pub(super) fn new(style: LineStyle, text: impl Into<String>) -> Self {
        Self {
            style,
            text: text.into(),
        }
    }
}
