//! The contract's forms of an instant, as text, and milliseconds. Pure: no clock is read.
//!
//! `YYYY-MM-DD`, a blank or `T`, `HH:MM[:SS[.f]]`, then nothing (UTC), `Z` or `+hh:mm` / `-hh:mm`; all else is refused.
//! The same forms are what the guards of the schema accept (a property test holds the two together), and what SQLite's
//! own date functions read. Times are instants; there is no local time.

use crate::domain::event::Millis;

/// Length of [`text`]: `YYYY-MM-DD HH:MM:SS.mmm`.
pub const TEXT_LEN: usize = 23;

const DAY: Millis = 86_400_000;
/// 0000-01-01T00:00:00Z and 9999-12-31T23:59:59.999Z.
const RANGE: std::ops::RangeInclusive<Millis> = -62_167_219_200_000..=253_402_300_799_999;

/// Reads an instant; `None` where the text has another form or names no instant. Fractions are cut at milliseconds.
pub fn parse(text: &str) -> Option<Millis> {
    let b = text.as_bytes();
    // fixed part: YYYY-MM-DD HH:MM
    if b.len() < 16 || b[4] != b'-' || b[7] != b'-' || !matches!(b[10], b' ' | b'T') || b[13] != b':' {
        return None;
    }
    let year = two(b, 0)? * 100 + two(b, 2)?;
    let (month, day, hour, minute) = (two(b, 5)?, two(b, 8)?, two(b, 11)?, two(b, 14)?);
    if !(1..=12).contains(&month) || day < 1 || day > days_in(year, month) || hour > 23 || minute > 59 {
        return None;
    }
    let mut at = 16;
    let (mut second, mut milli) = (0, 0);
    if b.get(at) == Some(&b':') {
        second = two(b, at + 1)?;
        if second > 59 {
            return None;
        }
        at += 3;
        if b.get(at) == Some(&b'.') {
            let digits = b[at + 1..].iter().take_while(|c| c.is_ascii_digit()).count();
            if digits == 0 {
                return None;
            }
            for i in 0..3 {
                milli = milli * 10 + if i < digits { i64::from(b[at + 1 + i] - b'0') } else { 0 };
            }
            at += 1 + digits;
        }
    }
    let offset = zone(&b[at..])?;
    let millis =
        days_from_civil(year, month, day) * DAY + ((hour * 60 + minute - offset) * 60 + second) * 1_000 + milli;
    RANGE.contains(&millis).then_some(millis)
}

/// The form that outboxd writes: UTC, milliseconds, sorts as text beside SQLite's `CURRENT_TIMESTAMP`.
/// Instants outside the years 0000 to 9999 are drawn to the nearest end.
pub fn text(millis: Millis) -> String {
    render(millis, ' ', "")
}

/// RFC 3339 in UTC: `2026-10-07T01:20:00.250Z`.
pub fn rfc3339(millis: Millis) -> String {
    render(millis, 'T', "Z")
}

fn render(millis: Millis, between: char, end: &str) -> String {
    let millis = millis.clamp(*RANGE.start(), *RANGE.end());
    let (days, rest) = (millis.div_euclid(DAY), millis.rem_euclid(DAY));
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second, milli) = (rest / 3_600_000, rest / 60_000 % 60, rest / 1_000 % 60, rest % 1_000);
    format!("{year:04}-{month:02}-{day:02}{between}{hour:02}:{minute:02}:{second:02}.{milli:03}{end}")
}

/// Minutes east of UTC.
fn zone(b: &[u8]) -> Option<i64> {
    match b {
        [] | [b'Z'] => Some(0),
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) = (two(b, 1)?, two(b, 4)?);
            // SQLite reads offsets up to 14:59
            if hours > 14 || minutes > 59 {
                return None;
            }
            let east = hours * 60 + minutes;
            Some(if *sign == b'+' { east } else { -east })
        }
        _ => None,
    }
}

fn two(b: &[u8], at: usize) -> Option<i64> {
    match b.get(at..at + 2)? {
        [tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => Some(i64::from(tens - b'0') * 10 + i64::from(ones - b'0')),
        _ => None,
    }
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970-01-01 of the proleptic Gregorian calendar (Howard Hinnant, chrono-compatible date algorithms).
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let yoe = y.rem_euclid(400);
    let doy = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    (year, month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_forms_of_the_contract_are_read() {
        let want = 1_791_336_000_000; // 2026-10-07T01:20:00Z
        for form in [
            "2026-10-07 01:20",
            "2026-10-07T01:20",
            "2026-10-07 01:20:00",
            "2026-10-07T01:20:00Z",
            "2026-10-07 01:20Z",
            "2026-10-07 01:20:00.000",
            "2026-10-07T01:20:00.0009999Z",
            "2026-10-07T10:20:00+09:00",
            "2026-10-06 21:50:00.0-03:30",
        ] {
            assert_eq!(parse(form), Some(want), "{form}");
        }
        assert_eq!(parse("2026-10-07 01:20:00.25"), Some(want + 250));
    }

    #[test]
    fn everything_else_is_refused() {
        for form in [
            "",
            "now",
            "2026-10-07",
            "2026-10-07T",
            "2026-10-07 01",
            "01:20:00",
            "2026-10-07 1:20",
            "2026-10-7 01:20",
            "2026-10-07  01:20",
            " 2026-10-07 01:20",
            "2026-10-07 01:20 ",
            "2026-10-07 01:20 Z",
            "2026-10-07 01:20z",
            "2026-10-07t01:20",
            "2026-10-07 01:20:00.",
            "2026-10-07 01:20:",
            "2026-10-07 24:00",
            "2026-10-07 01:60",
            "2026-10-07 01:20:60",
            "2026-02-29 00:00",
            "2026-13-01 00:00",
            "2026-00-01 00:00",
            "2026-01-00 00:00",
            "2026-04-31 00:00",
            "2026-10-07 01:20+0900",
            "2026-10-07 01:20+9:00",
            "2026-10-07 01:20+15:00",
            "2026-10-07 01:20+01:60",
            "2461320.5",
            "1791336000",
            "2026-10-07 01:20:00,5",
            "2026-10-07T01:20:00 UTC",
            "20261007T012000Z",
            "-2026-10-07 01:20",
            "9999-12-31 23:59-01:00",
            "0000-01-01 00:00+01:00",
            "２026-10-07 01:20",
        ] {
            assert_eq!(parse(form), None, "{form:?}");
        }
    }

    #[test]
    fn what_we_write_sorts_beside_current_timestamp() {
        assert_eq!(text(1_791_336_000_250), "2026-10-07 01:20:00.250");
        assert!(text(1_791_336_000_250).as_str() > "2026-10-07 01:20:00");
        assert_eq!(rfc3339(1_791_336_000_250), "2026-10-07T01:20:00.250Z");
        assert_eq!(text(1).len(), TEXT_LEN);
        assert_eq!(text(i64::MAX), "9999-12-31 23:59:59.999");
        assert_eq!(text(i64::MIN), "0000-01-01 00:00:00.000");
    }

    proptest! {
        #[test]
        fn an_instant_comes_back_as_it_went(millis in RANGE) {
            prop_assert_eq!(parse(&text(millis)), Some(millis));
            prop_assert_eq!(parse(&rfc3339(millis)), Some(millis));
        }

        #[test]
        // jiff's instants end a day before 9999-12-31 does
        fn it_agrees_with_jiff(millis in *RANGE.start()..*RANGE.end() - 2 * DAY) {
            let stamp = jiff::Timestamp::from_millisecond(millis).unwrap();
            let theirs = stamp.strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string();
            prop_assert_eq!(rfc3339(millis), theirs);
        }

        #[test]
        fn dates_agree_with_jiff(y in 0i16..=9998, m in 0i8..=13, d in 0i8..=32, h in 0i8..=24, min in 0i8..=60, s in 0i8..=60, oh in 0i64..=15, om in 0i64..=60, east: bool) {
            let sign = if east { '+' } else { '-' };
            let form = format!("{y:04}-{m:02}-{d:02}T{h:02}:{min:02}:{s:02}{sign}{oh:02}:{om:02}");
            let theirs = jiff::civil::DateTime::new(y, m, d, h, min, s, 0).ok().filter(|_| oh <= 14 && om <= 59).and_then(|dt| {
                let east_s = (oh * 60 + om) * 60 * if east { 1 } else { -1 };
                let millis = jiff::tz::TimeZone::UTC.to_timestamp(dt).ok()?.as_millisecond() - east_s * 1000;
                RANGE.contains(&millis).then_some(millis)
            });
            prop_assert_eq!(parse(&form), theirs, "{}", form);
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,40}") {
            let _ = parse(&text);
        }

        #[test]
        fn no_text_of_the_alphabet_makes_it_panic(text in "[0-9TZ:. +-]{0,30}") {
            let _ = parse(&text);
        }
    }
}
