//! What came back on an ext_proc stream.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::core::v3::HeaderValueOption;
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, CommonResponse, HeaderMutation, ImmediateResponse, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value as ProtoValue};
use serde_json::Value;

/// The name of the destination in header and metadata.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";

/// All replies of a stream.
#[derive(Debug, Default)]
pub struct Replies {
    /// In order.
    pub all: Vec<ProcessingResponse>,
    /// The gRPC status, if the stream failed.
    pub failed: Option<tonic::Status>,
}

/// An answer in place of an engine's.
#[derive(Debug)]
pub struct Immediate<'a>(&'a ImmediateResponse);

impl Replies {
    /// The kind of each reply, in the words of the cases.
    pub fn kinds(&self) -> Vec<&'static str> {
        let kind = |reply: &ProcessingResponse| match reply.response.as_ref().expect("an empty reply") {
            Response::RequestHeaders(_) => "rh",
            Response::RequestBody(_) => "rb",
            Response::RequestTrailers(_) => "rt",
            Response::ResponseHeaders(_) => "sh",
            Response::ResponseBody(_) => "sb",
            Response::ResponseTrailers(_) => "st",
            Response::ImmediateResponse(_) => "immediate",
            Response::StreamedImmediateResponse(_) => "streamed immediate",
        };
        self.all.iter().map(kind).collect()
    }

    /// How many replies are of this kind.
    pub fn count(&self, kind: &str) -> usize {
        self.kinds().iter().filter(|found| **found == kind).count()
    }

    /// The answer in place of an engine's, if the picker gave one.
    pub fn immediate(&self) -> Option<Immediate<'_>> {
        self.all.iter().find_map(|reply| match &reply.response {
            Some(Response::ImmediateResponse(immediate)) => Some(Immediate(immediate)),
            _ => None,
        })
    }

    /// The status of the answer in place of an engine's.
    #[track_caller]
    pub fn refused(&self) -> Immediate<'_> {
        self.immediate().unwrap_or_else(|| panic!("not refused: {:?} {:?}", self.kinds(), self.failed))
    }

    /// The header mutation of the decision, wherever it rides.
    fn mutation(&self) -> Option<&HeaderMutation> {
        self.all.iter().find_map(|reply| {
            let response = match reply.response.as_ref()? {
                Response::RequestHeaders(headers) => headers.response.as_ref()?,
                Response::RequestBody(body) => body.response.as_ref()?,
                _ => return None,
            };
            response.header_mutation.as_ref()
        })
    }

    /// The destination list, if there is a decision; header and metadata must agree, and the header must replace.
    #[track_caller]
    pub fn destination(&self) -> Option<String> {
        let mutation = self.mutation()?;
        let set: Vec<&HeaderValueOption> = mutation
            .set_headers
            .iter()
            .filter(|option| option.header.as_ref().unwrap().key.eq_ignore_ascii_case(DESTINATION))
            .collect();
        assert_eq!(set.len(), 1, "the destination is set once: {mutation:?}");
        assert_eq!(set[0].append_action(), HeaderAppendAction::OverwriteIfExistsOrAdd);
        let destination = text(set[0]);
        assert_eq!(self.metadata("envoy.lb", DESTINATION).as_deref(), Some(&*destination));
        Some(destination)
    }

    /// The destinations, best first.
    #[track_caller]
    pub fn choices(&self) -> Vec<String> {
        let list = self.destination();
        let list = list.unwrap_or_else(|| panic!("no decision: {:?} {:?}", self.all, self.failed));
        list.split(',').map(str::to_owned).collect()
    }

    /// The first destination.
    #[track_caller]
    pub fn first_choice(&self) -> &str {
        let mutation = self.mutation();
        let mutation = mutation.unwrap_or_else(|| panic!("no decision: {:?} {:?}", self.all, self.failed));
        let mut set = mutation.set_headers.iter().map(|option| option.header.as_ref().unwrap());
        let header = set.find(|header| header.key == DESTINATION).expect("a destination");
        std::str::from_utf8(&header.raw_value).unwrap().split(',').next().unwrap()
    }

    /// A field of the dynamic metadata, from whichever reply carries it.
    pub fn metadata(&self, namespace: &str, field: &str) -> Option<String> {
        self.all.iter().find_map(|reply| {
            let namespaces: &Struct = reply.dynamic_metadata.as_ref()?;
            let Some(Kind::StructValue(fields)) = &namespaces.fields.get(namespace)?.kind else {
                return None;
            };
            match fields.fields.get(field)?.kind.as_ref()? {
                Kind::StringValue(text) => Some(text.clone()),
                Kind::NumberValue(number) => Some(number.to_string()),
                other => panic!("{field} is {other:?}"),
            }
        })
    }

    /// The scores that Envoy is told, by address.
    pub fn scores(&self) -> Option<BTreeMap<String, f64>> {
        self.all.iter().find_map(|reply| {
            let Kind::StructValue(lb) =
                reply.dynamic_metadata.as_ref()?.fields.get("envoy.lb")?.kind.as_ref()?
            else {
                return None;
            };
            let scores = lb.fields.get("x-gateway-destination-endpoint-scores")?;
            let Some(Kind::StructValue(scores)) = &scores.kind else { panic!("no struct: {scores:?}") };
            let number = |value: &ProtoValue| match value.kind {
                Some(Kind::NumberValue(number)) => number,
                ref other => panic!("no number: {other:?}"),
            };
            Some(scores.fields.iter().map(|(address, score)| (address.clone(), number(score))).collect())
        })
    }

    /// A request header that the decision sets.
    pub fn set_header(&self, name: &str) -> Option<String> {
        let set = &self.mutation()?.set_headers;
        set.iter().find(|option| option.header.as_ref().unwrap().key == name).map(text)
    }

    /// A response header that the reply to response headers sets.
    pub fn response_header(&self, name: &str) -> Option<String> {
        self.all.iter().find_map(|reply| {
            let Some(Response::ResponseHeaders(headers)) = &reply.response else { return None };
            let set = &headers.response.as_ref()?.header_mutation.as_ref()?.set_headers;
            set.iter().find(|option| option.header.as_ref().unwrap().key == name).map(text)
        })
    }

    /// Request headers that the decision removes.
    pub fn removed(&self) -> Vec<&str> {
        self.mutation().iter().flat_map(|m| &m.remove_headers).map(String::as_str).collect()
    }

    /// The pieces of the request body that came back in full duplex, with their end marks.
    pub fn pieces(&self) -> Vec<(&[u8], bool)> {
        self.all
            .iter()
            .filter_map(|reply| match &reply.response {
                Some(Response::RequestBody(body)) => Some(body),
                _ => None,
            })
            .map(piece)
            .collect()
    }

    /// The pieces of the response body that came back in full duplex, with their end marks.
    pub fn response_pieces(&self) -> Vec<(&[u8], bool)> {
        self.all
            .iter()
            .filter_map(|reply| match &reply.response {
                Some(Response::ResponseBody(body)) => Some(body),
                _ => None,
            })
            .map(piece)
            .collect()
    }

    /// The request body that came back in full duplex.
    pub fn body(&self) -> Vec<u8> {
        self.pieces().into_iter().flat_map(|(bytes, _)| bytes.to_vec()).collect()
    }

    /// The response body that came back in full duplex.
    pub fn response_body(&self) -> Vec<u8> {
        self.response_pieces().into_iter().flat_map(|(bytes, _)| bytes.to_vec()).collect()
    }

    /// Where the end marks of the request body are.
    pub fn ends(&self) -> Vec<usize> {
        let pieces = self.pieces();
        pieces.iter().enumerate().filter(|(_, (_, end))| *end).map(|(at, _)| at).collect()
    }

    /// The whole body that a buffered mode put in place of the request's, if it did.
    pub fn replaced_body(&self) -> Option<&[u8]> {
        self.all.iter().find_map(|reply| match &reply.response {
            Some(Response::RequestBody(body)) => {
                match body.response.as_ref()?.body_mutation.as_ref()?.mutation.as_ref()? {
                    Mutation::Body(bytes) => Some(&bytes[..]),
                    other => panic!("no whole body: {other:?}"),
                }
            }
            _ => None,
        })
    }
}

fn text(option: &HeaderValueOption) -> String {
    String::from_utf8(option.header.as_ref().unwrap().raw_value.clone()).unwrap()
}

fn piece(body: &BodyResponse) -> (&[u8], bool) {
    let mutation = body.response.as_ref().and_then(|r: &CommonResponse| r.body_mutation.as_ref());
    match mutation.and_then(|mutation| mutation.mutation.as_ref()) {
        Some(Mutation::StreamedResponse(piece)) => (&piece.body, piece.end_of_stream),
        other => panic!("no piece in full duplex: {other:?}"),
    }
}

impl Immediate<'_> {
    /// Its status.
    pub fn status(&self) -> i32 {
        self.0.status.as_ref().unwrap().code
    }

    /// A header of it.
    pub fn header(&self, name: &str) -> Option<String> {
        let set = &self.0.headers.as_ref()?.set_headers;
        set.iter().find(|option| option.header.as_ref().unwrap().key == name).map(text)
    }

    /// Its machine-readable reason.
    pub fn reason(&self) -> String {
        self.header("x-pilotfish-reason").expect("every refusal has a reason")
    }

    /// Its body.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.0.body).unwrap()
    }

    /// The message of its OpenAI error object, which must be one.
    pub fn message(&self) -> String {
        let body = self.json();
        let error = &body["error"];
        assert!(error["type"].is_string() && error["code"].is_string(), "no OpenAI error: {body}");
        error["message"].as_str().unwrap_or_else(|| panic!("no OpenAI error: {body}")).to_owned()
    }
}
