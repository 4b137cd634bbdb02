//! Which spans of time there are around a moment, and how they are called.

use jiff::civil::{Date, Time};
use jiff::tz::Offset;
use jiff::{Timestamp, ToSpan as _};
use obol_model::Window;

/// Milliseconds of a minute, in which rates are counted.
pub(crate) const MINUTE: i64 = 60_000;
const DAY: i64 = 24 * 60 * MINUTE;

/// The previous, the current and the next window around a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Windows {
    /// How they are called in keys.
    pub(crate) names: [String; 3],
    /// When they begin, and when the last one ends, in ms since the epoch; `None` for one without end.
    pub(crate) bounds: Option<[i64; 4]>,
    /// For how long in ms a counter is kept when its window is over: what began in it settles in it.
    pub(crate) keep: i64,
}

impl Windows {
    pub(crate) fn around(window: Window, now: Timestamp) -> Self {
        let today = Offset::UTC.to_datetime(now).date();
        let dates = match window {
            Window::Total => {
                let name = || "total".to_owned();
                return Self { names: [name(), name(), name()], bounds: None, keep: 0 };
            }
            Window::Day => [-1, 0, 1, 2].map(|days| today.saturating_add(days.days())),
            Window::Month => {
                let first = today.first_of_month();
                [-1, 0, 1, 2].map(|months| first.saturating_add(months.months()))
            }
        };
        let [previous, current, next, _] = dates;
        let name = |date: Date| match window {
            Window::Month => format!("month:{:04}-{:02}", date.year(), date.month()),
            Window::Day | Window::Total => format!("day:{date}"),
        };
        let keep = if window == Window::Month { 35 * DAY } else { 2 * DAY };
        Self {
            names: [name(previous), name(current), name(next)],
            bounds: Some(dates.map(|date| {
                let midnight = Offset::UTC.to_timestamp(date.to_datetime(Time::midnight()));
                midnight.map_or(i64::MAX, jiff::Timestamp::as_millisecond)
            })),
            keep,
        }
    }
}

/// The start of the minute, in ms since the epoch.
pub(crate) fn minute(now: Timestamp) -> i64 {
    now.as_millisecond().div_euclid(MINUTE) * MINUTE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(window: Window, now: &str) -> Windows {
        Windows::around(window, now.parse().unwrap())
    }

    #[test]
    fn days_and_months_of_utc() {
        let day = around(Window::Day, "2026-03-01T00:00:00Z");
        assert_eq!(day.names, ["day:2026-02-28", "day:2026-03-01", "day:2026-03-02"]);
        let [previous, current, next, end] = day.bounds.unwrap();
        assert_eq!([current - previous, next - current, end - next], [DAY; 3]);
        assert_eq!(current, "2026-03-01T00:00:00Z".parse::<Timestamp>().unwrap().as_millisecond());
        let month = around(Window::Month, "2028-01-31T23:59:59.999Z");
        assert_eq!(month.names, ["month:2027-12", "month:2028-01", "month:2028-02"]);
        let [_, _, february, march] = month.bounds.unwrap();
        assert_eq!(march - february, 29 * DAY);
        assert_eq!(around(Window::Total, "2026-03-01T00:00:00Z").bounds, None);
    }
}
