//! Reads multipart forms (audio uploads): only `model` and a few short fields.

use bytes::Bytes;
use futures::FutureExt;
use memchr::memmem;
use smallvec::SmallVec;

use super::prompt::Span;

/// What a form says, and where its `model` values stand.
#[derive(Default)]
pub(super) struct Form {
    pub(super) model: Option<Box<str>>,
    pub(super) models: SmallVec<[Span; 1]>,
    pub(super) stream: bool,
    pub(super) user: Option<Box<str>>,
}

/// The boundary, if the content type says that the body is a form.
pub(super) fn boundary(content_type: Option<&str>) -> Option<Result<String, &'static str>> {
    const FORM: &str = "multipart/form-data";
    let content_type = content_type?.trim_start();
    if !content_type.get(..FORM.len())?.eq_ignore_ascii_case(FORM) {
        return None;
    }
    Some(
        multer::parse_boundary(content_type)
            .map_err(|_| "content-type names no boundary; let the HTTP client set it"),
    )
}

/// Reads a whole form. The last of several equal names counts, as in Python's servers.
pub(super) fn read(boundary: &str, body: &[u8]) -> Result<Form, &'static str> {
    const CHUNK: usize = 64 << 10;
    let chunks =
        body.chunks(CHUNK).map(|chunk| Ok::<_, std::convert::Infallible>(Bytes::copy_from_slice(chunk)));
    let mut multipart = multer::Multipart::new(futures::stream::iter(chunks), boundary);
    let reading = async {
        let mut form = Form::default();
        let mut models: SmallVec<[(usize, Bytes); 1]> = SmallVec::new();
        while let Some(field) = multipart.next_field().await? {
            let index = field.index();
            match field.name() {
                Some("model") => models.push((index, field.bytes().await?)),
                Some("stream") => form.stream = field.bytes().await?.eq_ignore_ascii_case(b"true"),
                Some("user") => form.user = Some(field.text().await?.into()),
                _ => {}
            }
        }
        Ok::<_, multer::Error>((form, models))
    };
    let malformed = "its parts are malformed or the closing boundary is missing; send the form whole";
    // All bytes are there, so the future never waits.
    let (mut form, models) = reading.now_or_never().ok_or(malformed)?.map_err(|_| malformed)?;
    for (index, value) in models {
        let place = field_content(boundary, body, index).filter(|span| body[span.range()] == value[..]);
        form.models.push(place.ok_or(malformed)?);
        let name = std::str::from_utf8(&value).map_err(|_| "`model` is not UTF-8; encode it as UTF-8")?;
        form.model = Some(name.into());
    }
    Ok(form)
}

/// Where the content of the field with that index stands: multer yields copies, not places.
fn field_content(boundary: &str, body: &[u8], index: usize) -> Option<Span> {
    let delimiter = format!("\r\n--{boundary}");
    let finder = memmem::Finder::new(delimiter.as_bytes());
    // The first delimiter may open the body, then without its line break.
    let first = if body.starts_with(&delimiter.as_bytes()[2..]) { delimiter.len() - 2 } else { 0 };
    let starts = (first > 0)
        .then_some(first)
        .into_iter()
        .chain(finder.find_iter(&body[first..]).map(|found| first + found + delimiter.len()));
    let start = starts.into_iter().nth(index)?;
    let content = start + memmem::find(&body[start..], b"\r\n\r\n")? + 4;
    // An empty content shares the line break that ends its head.
    let end = content - 2 + finder.find(&body[content - 2..])?;
    Some(Span::new(content, end.max(content)))
}

#[cfg(test)]
mod tests {
    use super::{boundary, read};

    const FORM: &[u8] = b"--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\
        RIFF\x00\xffname=\"model\"\r\n--xy\r\n\r\n\r\n--xyz\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n\
        --xyz\r\ncontent-disposition: form-data; name=\"stream\"\r\n\r\ntrue\r\n--xyz--\r\n";

    #[test]
    fn a_form_names_its_model_and_where_it_stands() {
        let boundary = boundary(Some("Multipart/Form-Data; boundary=xyz")).unwrap().unwrap();
        let form = read(&boundary, FORM).unwrap();
        assert_eq!(form.model.as_deref(), Some("whisper-1"));
        assert!(form.stream);
        assert_eq!(&FORM[form.models[0].range()], b"whisper-1");
    }

    #[test]
    fn preamble_empty_fields_and_repeated_names_are_read() {
        let form =
            b"preamble\r\n--xyz  \r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\r\n--xyz\r\n\
            Content-Disposition: form-data; name=\"model\"\r\n\r\nlast\r\n--xyz--";
        let read = read("xyz", form).unwrap();
        assert_eq!(read.model.as_deref(), Some("last"));
        let places: Vec<&[u8]> = read.models.iter().map(|span| &form[span.range()]).collect();
        assert_eq!(places, [&b""[..], b"last"]);
    }

    #[test]
    fn broken_forms_are_errors() {
        assert!(read("xyz", &FORM[..FORM.len() - 40]).is_err());
        assert!(read("other", FORM).is_err());
        assert!(read("xyz", b"").is_err());
        assert!(boundary(Some("multipart/form-data")).unwrap().is_err());
        assert!(boundary(Some("application/json")).is_none());
        assert!(boundary(None).is_none());
    }
}
