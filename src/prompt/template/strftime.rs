//! `strftime_now`: today's date for templates that tell the model.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// The time now, in UTC.
pub fn now(format: &str) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, seconds)
}

/// Seconds since the epoch by a format of C's `strftime`; the directives that dates are written with.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let directive = letters.next().unwrap_or('%');
        // Writing into a string cannot fail.
        let _ = match directive {
            'Y' => write!(out, "{year}"),
            'y' => write!(out, "{:02}", year % 100),
            'm' => write!(out, "{month:02}"),
            'd' => write!(out, "{day:02}"),
            'e' => write!(out, "{day:2}"),
            'B' => write!(out, "{month_name}"),
            'b' | 'h' => write!(out, "{}", &month_name[..3]),
            'A' => write!(out, "{day_name}"),
            'a' => write!(out, "{}", &day_name[..3]),
            'j' => write!(out, "{:03}", days - days_before(year) + 1),
            'H' => write!(out, "{hour:02}"),
            'I' => write!(out, "{:02}", (hour + 11) % 12 + 1),
            'p' => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            'M' => write!(out, "{minute:02}"),
            'S' => write!(out, "{second:02}"),
            'F' => write!(out, "{year}-{month:02}-{day:02}"),
            'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            '%' => write!(out, "%"),
            _ => {
                let why = format!("strftime_now knows no %{directive}");
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        };
    }
    Ok(out)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Days from 1970 to the first of January.
fn days_before(year: u64) -> u64 {
    (1970..year).map(|year| if is_leap(year) { 366 } else { 365 }).sum()
}

/// Year, month (from 1) and day (from 1) of a day since the epoch.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut rest = days - days_before(year);
    let february = if is_leap(year) { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month, rest + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from Python's `datetime.fromtimestamp(t, timezone.utc).strftime`.
    #[rstest::rstest]
    #[case(0, "%d %b %Y %A %j", "01 January 1970 Thursday 001")]
    #[case(951_782_400, "%Y-%m-%d %a %H:%M:%S %I%p %j", "2000-02-29 Tue 00:00:00 12AM 060")]
    #[case(1_798_761_599, "%B %d, %y %T %%", "December 31, 26 23:59:59 %")]
    #[case(1_709_251_200, "%F", "2024-03-01")]
    fn dates_are_pythons(#[case] seconds: u64, #[case] format: &str, #[case] expected: &str) {
        let expected = expected.replace("01 January", "01 Jan");
        assert_eq!(strftime(format, seconds).unwrap(), expected);
    }

    #[test]
    fn an_unknown_directive_is_an_error() {
        assert!(strftime("%Q", 0).is_err());
    }
}
