//! The text of the help screen.

/// Keys and columns; no line is wider than 80 columns.
pub(super) const HELP: &str = "\
KEYS
  q, Esc              quit
  p, Space            pause or resume
  s                   sort by refused, requests, name or order
  Up, Down            scroll by one policy (also k, j)
  PageUp, PageDown    scroll by ten
  Home, End           first and last policy
  ?                   show or hide this help

COLUMNS
  passed/s, refused/s requests since the last refresh
  passed, refused     requests in the last hour
  share               the refused part of them
  last hour, refused  one character for three minutes, in wide terminals

A shadow policy refuses nothing: its numbers are of requests that it would
refuse. Yellow: the policy refused requests in this or the previous minute.
NO_COLOR=1 disables colours.";
