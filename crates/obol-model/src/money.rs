use std::fmt;
use std::ops::{Add, AddAssign};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An amount of money: a whole number of nano-USD (10⁻⁹ USD). Sums saturate.
///
/// INVARIANT: amounts stay below 2^53, so that Lua's doubles in Redis hold them exactly (DESIGN §5); the compiler of
/// workspaces refuses limits above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NanoUsd(u64);

impl NanoUsd {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// The largest amount that is exact everywhere.
    pub const MAX: Self = Self((1 << 53) - 1);

    /// `nanos` nano-USD; larger amounts than [`NanoUsd::MAX`] become it.
    pub fn new(nanos: u64) -> Self {
        Self(nanos.min(Self::MAX.0))
    }

    /// The number of nano-USD.
    pub fn nanos(self) -> u64 {
        self.0
    }
}

impl Add for NanoUsd {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self::new(self.0.saturating_add(other.0))
    }
}

impl AddAssign for NanoUsd {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for NanoUsd {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for NanoUsd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09} USD", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

/// A difference between amounts, in nano-USD.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SignedNanoUsd(i64);

impl SignedNanoUsd {
    /// `nanos` nano-USD.
    pub fn new(nanos: i64) -> Self {
        Self(nanos)
    }

    /// The number of nano-USD.
    pub fn nanos(self) -> i64 {
        self.0
    }
}

impl From<NanoUsd> for SignedNanoUsd {
    fn from(amount: NanoUsd) -> Self {
        Self(i64::try_from(amount.0).unwrap_or(i64::MAX))
    }
}

/// A decimal amount that is no price.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no price: a decimal number from 0 to 1000000 with at most 9 digits after the point")]
pub struct ParsePriceError(String);

/// A decimal amount that is no limit of spending.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no amount: a decimal number from 0 to 9007199.254740991 with at most 9 digits after the point"
)]
pub struct ParseAmountError(String);

/// The dearest price: what costs more is a slip of the decimal point.
const DEAREST: u64 = 1_000_000 * 1_000_000_000;

fn parse_decimal_nanos(s: &str, most: u64) -> Option<u64> {
    let (whole, fraction) = s.split_once('.').unwrap_or((s, ""));
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || whole.len() > 7 || fraction.len() > 9 || !digits(whole) || !digits(fraction) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let nanos: u64 = if fraction.is_empty() { 0 } else { format!("{fraction:0<9}").parse().ok()? };
    Some(whole * 1_000_000_000 + nanos).filter(|all| *all <= most)
}

/// As much of an input as a message quotes.
fn short(s: &str) -> String {
    s.chars().take(40).collect()
}

impl NanoUsd {
    /// Reads a limit in USD as a decimal, exactly, up to [`NanoUsd::MAX`]; prices, which have a lower bound, are read with
    /// [`str::parse`].
    ///
    /// # Errors
    /// When it is no decimal number, finer than a nano-USD, or more than can be counted.
    pub fn parse_limit(s: &str) -> Result<Self, ParseAmountError> {
        parse_decimal_nanos(s, Self::MAX.0).map(Self).ok_or_else(|| ParseAmountError(short(s)))
    }
}

impl FromStr for NanoUsd {
    type Err = ParsePriceError;
    /// Reads USD as a decimal, exactly: `0.15` is 150,000,000 nano-USD. No float is involved.
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        parse_decimal_nanos(s, DEAREST).map(Self::new).ok_or_else(|| ParsePriceError(short(s)))
    }
}

/// A price for one million units (tokens), in nano-USD.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PerMillion(NanoUsd);

impl PerMillion {
    /// `price` for a million units.
    pub fn new(price: NanoUsd) -> Self {
        Self(price)
    }

    /// What `units` cost, rounded up to the next nano-USD: rounding down would give away one call's remainder on
    /// every call.
    pub fn times(self, units: u64) -> NanoUsd {
        let exact = u128::from(self.0.nanos()) * u128::from(units);
        NanoUsd::new(u64::try_from(exact.div_ceil(1_000_000)).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn decimals_are_read_exactly() {
        for (text, nanos) in [
            ("0", 0),
            ("0.15", 150_000_000),
            ("1", 1_000_000_000),
            ("0.000000001", 1),
            ("12.5", 12_500_000_000),
        ] {
            assert_eq!(text.parse::<NanoUsd>().unwrap().nanos(), nanos, "{text}");
        }
        for bad in ["", "-1", "1e3", ".5", "1.0000000001", "abc", "1000001", "1.2.3", "0x1"] {
            assert!(bad.parse::<NanoUsd>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_limit_may_be_as_much_as_can_be_counted_exactly() {
        assert_eq!(NanoUsd::parse_limit("9007199.254740991"), Ok(NanoUsd::MAX));
        assert_eq!(NanoUsd::parse_limit("0"), Ok(NanoUsd::ZERO));
        for bad in ["9007199.254740992", "9007200", "10000000", "-1", "1e3", "", "0.0000000001"] {
            assert!(NanoUsd::parse_limit(bad).is_err(), "{bad}");
        }
        assert!("1000000".parse::<NanoUsd>().is_ok() && "1000000.1".parse::<NanoUsd>().is_err());
    }

    #[test]
    fn a_token_is_never_free_when_it_has_a_price() {
        let price = PerMillion::new("0.15".parse().unwrap());
        assert_eq!(price.times(1).nanos(), 150);
        assert_eq!(PerMillion::new(NanoUsd::new(1)).times(1).nanos(), 1);
        assert_eq!(price.times(0), NanoUsd::ZERO);
    }

    proptest! {
        #[test]
        fn cost_is_within_one_nano_of_exact(price in 0_u64..1_000_000_000_000, units in 0_u64..10_000_000) {
            let cost = PerMillion::new(NanoUsd::new(price)).times(units).nanos();
            let exact = u128::from(price) * u128::from(units);
            let capped = (exact / 1_000_000).min(u128::from(NanoUsd::MAX.nanos()));
            prop_assert!(u128::from(cost) >= capped && u128::from(cost) <= capped + 1);
        }
    }
}
