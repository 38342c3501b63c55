//! The begin of a request body, for upstreams that may say that they have not looked at it.

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use smallvec::SmallVec;

/// The begin of a request body is kept up to here while it may have to be sent once more. Parts are kept as they came,
/// so each may hold the buffer that it came in: they are counted, too.
const KEPT_BYTES: usize = 64 * 1024;
const KEPT_PARTS: usize = 16;

/// The begin of a request body, for the case that it has to be sent once more.
#[derive(Debug, Default)]
pub(super) struct Kept {
    parts: SmallVec<[Part; 2]>,
    bytes: usize,
    /// How many of the parts have been handed over, this time.
    told: usize,
    state: Keeping,
}

#[derive(Debug)]
enum Part {
    Data(Bytes),
    Trailers(Box<HeaderMap>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Keeping {
    /// Nothing has been read.
    #[default]
    NotBegun,
    /// All that was read is there.
    All,
    /// Some of it isn't any more.
    Lost,
}

impl Kept {
    /// From here on what is read is kept.
    pub(super) fn begin(&mut self) {
        if self.state == Keeping::NotBegun {
            self.state = Keeping::All;
        }
    }

    /// It need not come again, but for what is still to be told.
    pub(super) fn end(&mut self) {
        if self.state == Keeping::All {
            self.state = Keeping::Lost;
        }
        self.drop_told();
    }

    /// Something was read, and handed over.
    pub(super) fn add(&mut self, frame: &Frame<Bytes>) {
        let length = frame.data_ref().map_or(0, Bytes::len);
        if self.state != Keeping::All {
            self.state = Keeping::Lost;
            return;
        }
        if self.bytes + length > KEPT_BYTES || self.parts.len() >= KEPT_PARTS {
            return self.end();
        }
        self.bytes += length;
        let trailers = || {
            frame
                .trailers_ref()
                .map(|trailers| Part::Trailers(Box::new(trailers.clone())))
        };
        self.parts
            .extend(frame.data_ref().cloned().map(Part::Data).or_else(trailers));
        self.told = self.parts.len();
    }

    /// What stands before that which is still to come.
    pub(super) fn again(&mut self) -> Option<Frame<Bytes>> {
        let part = self.parts.get(self.told)?;
        let frame = match part {
            Part::Data(data) => Frame::data(data.clone()),
            Part::Trailers(trailers) => Frame::trailers(HeaderMap::clone(trailers)),
        };
        self.told += 1;
        if self.state == Keeping::Lost {
            self.drop_told();
        }
        Some(frame)
    }

    fn drop_told(&mut self) {
        if self.is_told() {
            (self.parts, self.told) = (SmallVec::new(), 0);
        }
    }

    /// Whether what comes next has to be read.
    pub(super) fn is_told(&self) -> bool {
        self.told == self.parts.len()
    }

    /// Of data, before anything has to be read.
    pub(super) fn untold_bytes(&self) -> u64 {
        let untold = self.parts.iter().skip(self.told);
        untold
            .map(|part| {
                if let Part::Data(data) = part {
                    data.len() as u64
                } else {
                    0
                }
            })
            .sum()
    }

    /// Tells all from the beginning. `false`: some of it is not there any more.
    pub(super) fn rewind(&mut self) -> bool {
        self.told = if self.state == Keeping::Lost {
            self.told
        } else {
            0
        };
        self.state != Keeping::Lost
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT_BYTES, KEPT_PARTS, Kept};
    use bytes::Bytes;
    use http::HeaderMap;
    use http_body::Frame;

    fn data(length: usize) -> Frame<Bytes> {
        Frame::data(vec![b'x'; length].into())
    }

    fn read(kept: &mut Kept, frames: impl IntoIterator<Item = Frame<Bytes>>) {
        frames.into_iter().for_each(|frame| kept.add(&frame));
    }

    /// The lengths of what is told again; trailers are 0.
    fn again(kept: &mut Kept) -> Vec<usize> {
        std::iter::from_fn(|| kept.again())
            .map(|frame| frame.data_ref().map_or(0, Bytes::len))
            .collect()
    }

    #[test]
    fn what_is_kept_comes_again_as_often_as_wanted() {
        let mut kept = Kept::default();
        assert!(kept.rewind(), "nothing was read");
        kept.begin();
        read(&mut kept, [data(3), data(4)]);
        for _ in 0..2 {
            assert!(kept.rewind());
            assert_eq!(kept.untold_bytes(), 7);
            assert_eq!(again(&mut kept), [3, 4]);
        }
        read(&mut kept, [Frame::trailers(HeaderMap::new())]);
        assert!(kept.rewind());
        // Nobody will ask for it again, but for what is not told yet.
        kept.end();
        assert_eq!(again(&mut kept), [3, 4, 0]);
        assert!(!kept.rewind() && kept.parts.is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        for (frames, is_there) in [
            (vec![data(KEPT_BYTES)], true),
            (vec![data(KEPT_BYTES), data(1)], false),
            ((0..KEPT_PARTS).map(|_| data(1)).collect(), true),
            ((0..=KEPT_PARTS).map(|_| data(1)).collect(), false),
        ] {
            let mut kept = Kept::default();
            kept.begin();
            read(&mut kept, frames);
            assert_eq!(kept.rewind(), is_there);
            assert_eq!(kept.parts.is_empty(), !is_there, "what is no use is let go");
        }
    }

    #[test]
    fn nothing_is_kept_that_nobody_asked_for() {
        let mut kept = Kept::default();
        read(&mut kept, [data(3)]);
        kept.begin();
        read(&mut kept, [data(3)]);
        assert!(!kept.rewind() && kept.parts.is_empty());
    }
}
