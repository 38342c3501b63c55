//! The headers that a parser extracts, and their log fields.

use http::HeaderName;
use smallvec::SmallVec;

/// The headers that the policies read, and the log fields mapped to them.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequiredHeaders {
    pub(crate) names: Vec<HeaderName>,
    /// Mapped log fields, each with the index of its header in `names`.
    pub(super) field_mappings: Vec<(u16, Box<str>)>,
}

impl RequiredHeaders {
    /// `field_mappings` are pairs of a header and the log field that holds its value.
    pub(crate) fn new<'n>(
        names: impl Iterator<Item = &'n HeaderName>,
        field_mappings: &'n [(HeaderName, String)],
    ) -> Self {
        let mut required = Self::default();
        for name in names.chain(field_mappings.iter().map(|(name, _)| name)) {
            if !required.names.contains(name) {
                required.names.push(name.clone());
            }
        }
        // The names are sorted, because the policy table has no stable order and reports must be
        // reproducible.
        required.names.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        required.names.truncate(usize::from(u16::MAX));
        required.field_mappings = field_mappings
            .iter()
            .filter_map(|(name, field)| {
                Some((required.header_index(name.as_str())?, field.as_str().into()))
            })
            .collect();
        required
    }

    /// Whether a log field is mapped to the header with this index.
    pub(crate) fn is_mapped(&self, header_index: usize) -> bool {
        let mut mapped = self.field_mappings.iter();
        mapped.any(|(index, _)| usize::from(*index) == header_index)
    }

    pub(super) fn header_index(&self, name: &str) -> Option<u16> {
        let mut names = self.names.iter();
        let index = names.position(|required| required.as_str() == name)?;
        u16::try_from(index).ok()
    }

    /// Returns the indices of the headers that are mapped to `field`. Adds that of
    /// `default_header`, unless this header is mapped to another field.
    pub(super) fn indices_for_field(
        &self,
        field: &str,
        default_header: Option<&str>,
    ) -> SmallVec<[u16; 1]> {
        let mapped = self
            .field_mappings
            .iter()
            .filter(|(_, mapped_field)| **mapped_field == *field)
            .map(|(place, _)| *place);
        let default_index = default_header.and_then(|own| self.header_index(own));
        let default_index =
            default_index.filter(|own| !self.field_mappings.iter().any(|(place, _)| place == own));
        mapped.chain(default_index).collect()
    }
}
