"""The functions of PostgreSQL that a statement may call and leave nothing behind on its connection.

Listed are the harmless VOLATILE functions, and the other ones in daily use: a function that is not here is looked up in
the catalogue when a handler has called it.
"""

_NAMES = (
    # Volatile: each is for rows, for the transaction, or for a sequence, which belongs to all.
    "clock_timestamp currval gen_random_uuid lastval nextval pg_advisory_xact_lock pg_advisory_xact_lock_shared "
    "pg_current_xact_id pg_notify pg_sleep pg_sleep_for pg_sleep_until pg_try_advisory_xact_lock "
    "pg_try_advisory_xact_lock_shared random random_normal setval timeofday txid_current uuidv4 uuidv7 "
    # Syntax.
    "cast coalesce extract greatest grouping least normalize nullif overlay position substring trim treat "
    # Aggregates and window functions.
    "any_value array_agg avg bit_and bit_or bit_xor bool_and bool_or corr count covar_pop covar_samp cume_dist "
    "dense_rank every first_value json_agg json_agg_strict json_arrayagg json_object_agg json_objectagg jsonb_agg "
    "jsonb_agg_strict jsonb_object_agg lag last_value lead max min mode nth_value ntile percent_rank percentile_cont "
    "percentile_disc range_agg range_intersect_agg rank regr_count regr_intercept regr_r2 regr_slope row_number "
    "stddev stddev_pop stddev_samp string_agg sum var_pop var_samp variance xmlagg "
    # Numbers.
    "abs acos asin atan atan2 cbrt ceil ceiling cos cot degrees div exp factorial floor gcd lcm ln log log10 "
    "min_scale mod pi power radians round scale sign sin sqrt tan trim_scale trunc width_bucket "
    # Texts.
    "ascii bit_length btrim char_length character_length chr concat concat_ws convert convert_from convert_to decode "
    "encode format get_byte initcap left length lower lpad ltrim md5 octet_length parse_ident quote_ident "
    "quote_literal quote_nullable regexp_count regexp_instr regexp_like regexp_match regexp_matches regexp_replace "
    "regexp_split_to_array regexp_split_to_table regexp_substr repeat replace reverse right rpad rtrim set_byte "
    "sha224 sha256 sha384 sha512 split_part starts_with string_to_array string_to_table strpos substr text to_ascii "
    "to_hex translate unistr upper "
    # Text search.
    "numnode phraseto_tsquery plainto_tsquery querytree setweight strip to_tsquery to_tsvector ts_delete ts_filter "
    "ts_headline ts_rank ts_rank_cd tsvector_to_array websearch_to_tsquery "
    # Times.
    "age date date_add date_bin date_part date_subtract date_trunc isfinite justify_days justify_hours "
    "justify_interval make_date make_interval make_time make_timestamp make_timestamptz now statement_timestamp "
    "timezone to_char to_date to_number to_timestamp transaction_timestamp "
    # JSON.
    "array_to_json json_array json_array_elements json_array_elements_text json_array_length json_build_array "
    "json_build_object json_each json_each_text json_exists json_extract_path json_extract_path_text json_object "
    "json_object_keys json_populate_record json_populate_recordset json_query json_strip_nulls json_to_record "
    "json_to_recordset json_typeof json_value jsonb_array_elements jsonb_array_elements_text jsonb_array_length "
    "jsonb_build_array jsonb_build_object jsonb_concat jsonb_delete jsonb_each jsonb_each_text jsonb_extract_path "
    "jsonb_extract_path_text jsonb_insert jsonb_object jsonb_object_keys jsonb_path_exists jsonb_path_match "
    "jsonb_path_query jsonb_path_query_array jsonb_path_query_first jsonb_populate_record jsonb_populate_recordset "
    "jsonb_pretty jsonb_set jsonb_set_lax jsonb_strip_nulls jsonb_to_record jsonb_to_recordset jsonb_typeof "
    "row_to_json to_json to_jsonb "
    # Arrays and ranges.
    "array_append array_cat array_dims array_fill array_length array_lower array_ndims array_position array_positions "
    "array_prepend array_remove array_replace array_reverse array_sample array_shuffle array_sort array_to_string "
    "array_upper cardinality daterange generate_series generate_subscripts int4range int8range isempty lower_inc "
    "lower_inf multirange num_nonnulls num_nulls numrange range_merge trim_array tsrange tstzrange unnest upper_inc "
    "upper_inf "
    # The server, its catalogue and its types.
    "col_description current_database current_query current_schema current_schemas current_setting format_type "
    "hashtext hashtextextended inet_client_addr inet_server_addr obj_description pg_backend_pid pg_column_size "
    "pg_current_xact_id_if_assigned pg_database_size pg_get_expr pg_get_serial_sequence pg_is_in_recovery "
    "pg_relation_size pg_table_size pg_total_relation_size pg_typeof shobj_description to_regclass "
    "txid_current_if_assigned uuid_extract_timestamp uuid_extract_version version "
)
HARMLESS = frozenset(_NAMES.split())
