use subtle::ConstantTimeEq as _;

use crate::{AuthError, Refusal};

/// The credential of a request, from the values of its `Authorization` and `x-api-key` headers (DESIGN §8.1; pass
/// `None` for `x-api-key` where it is not accepted). Both may be there when they agree. A header without a value, which
/// clients send whose key is not configured, counts as none.
///
/// A header that occurs twice is for the caller to refuse.
///
/// # Errors
/// [`AuthError::Missing`] without a credential; [`AuthError::Invalid`] for another scheme than `Bearer`, for what
/// cannot be a token, and for two credentials that differ.
pub fn credential<'a>(
    authorization: Option<&'a [u8]>,
    x_api_key: Option<&'a [u8]>,
) -> Result<&'a str, AuthError> {
    let bearer = authorization.map(bearer).transpose()?.flatten();
    let api_key = x_api_key.map(token).transpose()?.flatten();
    match (bearer, api_key) {
        (Some(bearer), Some(api_key)) if !bool::from(bearer.as_bytes().ct_eq(api_key.as_bytes())) => {
            Err(AuthError::invalid(Refusal::Conflicting))
        }
        (Some(credential), _) | (None, Some(credential)) => Ok(credential),
        (None, None) => Err(AuthError::Missing),
    }
}

/// `Bearer` in any case, spaces, a token (RFC 9110 section 11.4, RFC 6750 section 2.1).
fn bearer(value: &[u8]) -> Result<Option<&str>, AuthError> {
    let value = value.trim_ascii();
    if value.is_empty() {
        return Ok(None);
    }
    let end = value.iter().position(|&b| b == b' ').unwrap_or(value.len());
    let (scheme, rest) = value.split_at_checked(end).unwrap_or((value, &[]));
    if !scheme.eq_ignore_ascii_case(b"bearer") {
        return Err(AuthError::invalid(Refusal::Scheme));
    }
    token(rest)
}

fn token(value: &[u8]) -> Result<Option<&str>, AuthError> {
    let value = value.trim_ascii();
    if value.is_empty() {
        return Ok(None);
    }
    match std::str::from_utf8(value) {
        Ok(token) if token.bytes().all(|b| b.is_ascii_graphic()) => Ok(Some(token)),
        _ => Err(AuthError::invalid(Refusal::Malformed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Header = Option<&'static [u8]>;

    #[test]
    fn the_credential_is_found_where_clients_put_it() {
        for (authorization, x_api_key) in [
            (Some("Bearer obol_k"), None),
            (Some("bearer obol_k"), None),
            (Some("BEARER   obol_k "), None),
            (None, Some("obol_k")),
            (None, Some(" obol_k ")),
            (Some("Bearer obol_k"), Some("obol_k")),
            (Some("Bearer obol_k"), Some("")),
            (Some("Bearer "), Some("obol_k")),
            (Some(""), Some("obol_k")),
        ] {
            let found = credential(authorization.map(str::as_bytes), x_api_key.map(str::as_bytes));
            assert_eq!(found.ok(), Some("obol_k"), "{authorization:?} {x_api_key:?}");
        }
    }

    #[test]
    fn no_credential_is_not_a_bad_one() {
        for (authorization, x_api_key) in
            [(None, None), (Some(""), None), (Some("Bearer"), Some(" ")), (Some("Bearer  "), None)]
        {
            let found = credential(authorization.map(str::as_bytes), x_api_key.map(str::as_bytes));
            assert!(matches!(found, Err(AuthError::Missing)), "{authorization:?} {x_api_key:?}: {found:?}");
        }
    }

    #[test]
    fn what_is_no_single_token_is_refused() {
        let table: &[(Header, Header, Refusal)] = &[
            (Some(b"Basic dTpw"), None, Refusal::Scheme),
            (Some(b"obol_k"), None, Refusal::Scheme),
            (Some(b"Bearerobol_k"), None, Refusal::Scheme),
            (Some(b"Bearer\tobol_k"), None, Refusal::Scheme),
            (Some(b"Bearer obol_k obol_l"), None, Refusal::Malformed),
            (Some(b"Bearer obol_k, Bearer obol_l"), None, Refusal::Malformed),
            (Some(b"Bearer \xff\xfe"), None, Refusal::Malformed),
            (None, Some(b"obol k"), Refusal::Malformed),
            (Some(b"Bearer obol_k"), Some(b"obol_l"), Refusal::Conflicting),
            (Some(b"Bearer obol_k"), Some(b"obol_kk"), Refusal::Conflicting),
        ];
        for (authorization, x_api_key, expected) in table {
            let found = credential(*authorization, *x_api_key);
            assert!(
                matches!(found, Err(AuthError::Invalid { reason }) if reason == *expected),
                "{expected:?}: {found:?}"
            );
        }
    }
}
