use std::fmt;

use serde::{Deserialize, Deserializer};
use subtle::ConstantTimeEq;

/// A value that cannot be printed, compared in variable time or serialised.
///
/// `Debug` shows `[secret]`; there is no `Display` and no `Serialize`. The value is reached through
/// [`Secret::expose`], which is easy to search for.
#[derive(Clone, Default)]
pub struct Secret<T = String>(T);

impl<T> Secret<T> {
    /// Takes `value` out of everybody's sight.
    pub fn new(value: T) -> Self {
        Self(value)
    }

    /// The value itself. Never hand it to a log, an error or a metric.
    pub fn expose(&self) -> &T {
        &self.0
    }
}

impl<T: AsRef<[u8]>> Secret<T> {
    /// Whether `other` is the same value, in time that depends only on the lengths.
    pub fn matches(&self, other: &[u8]) -> bool {
        self.0.as_ref().ct_eq(other).into()
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl<T> From<T> for Secret<T> {
    fn from(value: T) -> Self {
        Self(value)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Secret<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        T::deserialize(d).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_nothing_of_the_value() {
        assert_eq!(format!("{:?}", Secret::new("hunter2".to_owned())), "[secret]");
    }

    #[test]
    fn comparison_is_exact() {
        let s = Secret::new("abc".to_owned());
        assert!(s.matches(b"abc"));
        assert!(!s.matches(b"abd"));
        assert!(!s.matches(b"abcd"));
    }
}
