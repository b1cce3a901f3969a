//! From a time as the outbox stores it to RFC 3339 in UTC, as `ce-time` wants it. Pure text: no clock, no zone data.
//!
//! Stored forms: `YYYY-MM-DD`, blank or `T`, `HH:MM[:SS[.f]]`, then nothing (UTC), `Z` or `+hh:mm` / `-hh:mm`.
//! May import: std.

/// The instant in UTC with its fraction as it was written (at most nine digits); `None` where the text is no time.
pub fn rfc3339(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    if !text.is_ascii() || bytes.len() < 16 || bytes[4] != b'-' || bytes[7] != b'-' || bytes[13] != b':' {
        return None;
    }
    if !matches!(bytes[10], b' ' | b'T') {
        return None;
    }
    let (year, month, day) = (number(&text[..4])?, number(&text[5..7])?, number(&text[8..10])?);
    let (hour, minute) = (number(&text[11..13])?, number(&text[14..16])?);
    let (second, fraction, zone) = seconds(&text[16..])?;
    let in_range = (1..=12).contains(&month)
        && (1..=days_of_month(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second < 60;
    if !in_range {
        return None;
    }
    let shift = offset_minutes(zone)?;
    let minutes = days_from_civil(year, month, day) * 1_440 + hour * 60 + minute - shift;
    let (year, month, day) = civil_from_days(minutes.div_euclid(1_440));
    let of_day = minutes.rem_euclid(1_440);
    if !(0..=9_999).contains(&year) {
        return None;
    }
    let (hour, minute) = (of_day / 60, of_day % 60);
    let dot = if fraction.is_empty() { "" } else { "." };
    Some(format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{dot}{fraction}Z"))
}

/// `:SS[.f]` and what follows; without seconds zero of them.
fn seconds(rest: &str) -> Option<(i64, &str, &str)> {
    let Some(after) = rest.strip_prefix(':') else { return Some((0, "", rest)) };
    let second = number(after.get(..2)?)?;
    let after = &after[2..];
    let Some(digits) = after.strip_prefix('.') else { return Some((second, "", after)) };
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    if end == 0 { None } else { Some((second, &digits[..end.min(9)], &digits[end..])) }
}

/// Minutes east of UTC.
fn offset_minutes(zone: &str) -> Option<i64> {
    let sign = match zone.as_bytes() {
        [] | [b'Z'] => return Some(0),
        [b'+', _, _, b':', _, _] => 1,
        [b'-', _, _, b':', _, _] => -1,
        _ => return None,
    };
    let (hours, minutes) = (number(&zone[1..3])?, number(&zone[4..6])?);
    if hours < 24 && minutes < 60 { Some(sign * (hours * 60 + minutes)) } else { None }
}

fn number(digits: &str) -> Option<i64> {
    if digits.bytes().all(|b| b.is_ascii_digit()) { digits.parse().ok() } else { None }
}

fn days_of_month(year: i64, month: i64) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

/// Days since 1970-01-01 of a date in the proleptic Gregorian calendar (Howard Hinnant, "chrono-Compatible Low-Level
/// Date Algorithms").
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The reverse of [`days_from_civil`].
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stored_forms_become_utc() {
        let cases = [
            ("2026-10-07 01:20:00", "2026-10-07T01:20:00Z"),
            ("2026-10-07 01:20:00.125", "2026-10-07T01:20:00.125Z"),
            ("2026-10-07T01:20:00Z", "2026-10-07T01:20:00Z"),
            ("2026-10-07T01:20", "2026-10-07T01:20:00Z"),
            ("2026-10-07 01:20Z", "2026-10-07T01:20:00Z"),
            ("2026-10-07T01:20:00+09:00", "2026-10-06T16:20:00Z"),
            ("2026-12-31 23:30:59.5-00:45", "2027-01-01T00:15:59.5Z"),
            ("2024-02-29 00:00:00", "2024-02-29T00:00:00Z"),
            ("2024-03-01T00:00+00:01", "2024-02-29T23:59:00Z"),
            ("2026-01-01 00:00:00.1234567890123", "2026-01-01T00:00:00.123456789Z"),
        ];
        for (stored, wanted) in cases {
            assert_eq!(rfc3339(stored).as_deref(), Some(wanted), "{stored}");
        }
    }

    #[test]
    fn what_is_no_time_is_none() {
        let cases = [
            "",
            "now",
            "2026-10-07",
            "2026-10-07x01:20:00",
            "2026-13-07 01:20:00",
            "2026-02-29 01:20:00",
            "2100-02-29 01:20:00",
            "2026-10-07 24:00:00",
            "2026-10-07 01:60:00",
            "2026-10-07 01:20:60",
            "2026-10-07 01:20:00.",
            "2026-10-07 01:20:0",
            "2026-10-07 01:20:00 UTC",
            "2026-10-07 01:20:00+9:00",
            "2026-10-07 01:20:00+24:00",
            "2026-10-07 01:20:00+09:00x",
            "+026-10-07 01:20:00",
            "0000-01-01 00:00:00+01:00",
            "2026-10-07 01:20:００",
        ];
        for text in cases {
            assert_eq!(rfc3339(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn days_and_dates_are_each_others_reverse(days in -719_528i64..=2_932_896) {
            let (year, month, day) = civil_from_days(days);
            prop_assert!((0..=9_999).contains(&year) && (1..=12).contains(&month));
            prop_assert!((1..=days_of_month(year, month)).contains(&day));
            prop_assert_eq!(days_from_civil(year, month, day), days);
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9]{4}[-x][0-9]{2}-[0-9]{2}[ Tü][0-9:.+Zü-]{0,16}") {
            if let Some(utc) = rfc3339(&text) {
                let again = rfc3339(&utc);
                prop_assert_eq!(again, Some(utc));
            }
        }
    }
}
