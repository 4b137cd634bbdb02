use std::fmt;

/// A revision of the legacy era that Obol speaks (DESIGN §2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProtocolVersion {
    /// 2025-03-26: batches.
    V2025_03_26,
    /// 2025-06-18: structured output, `MCP-Protocol-Version`.
    V2025_06_18,
    /// 2025-11-25: priming events, icons.
    V2025_11_25,
}

impl ProtocolVersion {
    /// The newest revision of the legacy era.
    pub const LATEST: Self = Self::V2025_11_25;

    /// All of them, oldest first.
    pub const ALL: [Self; 3] = [Self::V2025_03_26, Self::V2025_06_18, Self::V2025_11_25];

    /// The text on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V2025_03_26 => "2025-03-26",
            Self::V2025_06_18 => "2025-06-18",
            Self::V2025_11_25 => "2025-11-25",
        }
    }

    /// The revision with this text, when it is one that Obol speaks.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|v| v.as_str() == text)
    }

    /// The revision of an `initialize` that asks for `requested`, and the text to answer with: the same when it is
    /// supported, else the latest (lifecycle, "Version Negotiation"). 2024-11-05 is echoed and served as 2025-03-26
    /// (DESIGN §9.6).
    pub fn negotiate(requested: &str) -> (Self, &'static str) {
        if requested == "2024-11-05" {
            return (Self::V2025_03_26, "2024-11-05");
        }
        let version = Self::parse(requested).unwrap_or(Self::LATEST);
        (version, version.as_str())
    }

    /// Whether `text` names a revision of the modern era: a date of 2026-07-28 or later (DESIGN §9.2).
    pub fn is_modern(text: &str) -> bool {
        let bytes = text.as_bytes();
        let date = bytes.len() == 10
            && bytes
                .iter()
                .enumerate()
                .all(|(i, b)| if i == 4 || i == 7 { *b == b'-' } else { b.is_ascii_digit() });
        date && text >= "2026-07-28"
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negotiation_follows_the_lifecycle_page() {
        for (asked, text) in [
            ("2025-03-26", "2025-03-26"),
            ("2025-11-25", "2025-11-25"),
            ("2024-11-05", "2024-11-05"),
            ("1900-01-01", "2025-11-25"),
            ("2026-07-28", "2025-11-25"),
            ("", "2025-11-25"),
        ] {
            assert_eq!(ProtocolVersion::negotiate(asked).1, text, "{asked}");
        }
    }

    #[test]
    fn only_dates_of_the_modern_era_are_modern() {
        assert!(ProtocolVersion::is_modern("2026-07-28"));
        assert!(ProtocolVersion::is_modern("2027-01-01"));
        for legacy in ["2025-11-25", "", "zzzz", "2026-07-2x", "DRAFT-2027", "99999-01-01"] {
            assert!(!ProtocolVersion::is_modern(legacy), "{legacy}");
        }
    }
}
