import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import java.util.Map;
import java.util.TreeMap;
import org.apache.avro.Schema;
import org.apache.avro.SchemaCompatibility;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.DecoderFactory;

/**
 * Decodes with Apache Avro's own implementation. A line of input: {"writer", "reader", "values": [hex]}. A line of
 * output: {"compatible", "values": [value or {"error"}]}, or {"invalid"}. Floats are their bits, bytes are hex, records
 * are lists of their fields, maps are lists of pairs by key.
 */
public class AvroReference {
  private static final ObjectMapper JSON = new ObjectMapper();

  public static void main(String[] arguments) throws Exception {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    PrintStream out = new PrintStream(System.out, false, "UTF-8");
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      out.println(JSON.writeValueAsString(answer(JSON.readTree(line))));
      out.flush();
    }
  }

  private static ObjectNode answer(JsonNode question) {
    ObjectNode answer = JSON.createObjectNode();
    Schema writer;
    Schema reader;
    try {
      writer = new Schema.Parser().parse(question.get("writer").toString());
      reader = new Schema.Parser().parse(question.get("reader").toString());
    } catch (RuntimeException error) {
      return answer.put("invalid", String.valueOf(error));
    }
    answer.put("compatible", SchemaCompatibility.checkReaderWriterCompatibility(reader, writer).getType().toString());
    ArrayNode values = answer.putArray("values");
    GenericDatumReader<Object> datums = new GenericDatumReader<>(writer, reader);
    for (JsonNode each : question.get("values")) {
      try {
        byte[] bytes = HexFormat.of().parseHex(each.textValue());
        BinaryDecoder decoder = DecoderFactory.get().directBinaryDecoder(new ByteArrayInputStream(bytes), null);
        Object value = datums.read(null, decoder);
        JsonNode found = plain(reader, value);
        if (decoder.inputStream().read() >= 0) {
          throw new IllegalStateException("bytes are left");
        }
        values.add(found);
      } catch (Exception | StackOverflowError | OutOfMemoryError error) {
        values.addObject().put("error", String.valueOf(error));
      }
    }
    return answer;
  }

  private static JsonNode plain(Schema schema, Object value) {
    switch (schema.getType()) {
      case UNION:
        return plain(schema.getTypes().get(GenericData.get().resolveUnion(schema, value)), value);
      case NULL:
        return JSON.nullNode();
      case BOOLEAN:
        return JSON.getNodeFactory().booleanNode((Boolean) value);
      case INT:
        return JSON.getNodeFactory().numberNode((Integer) value);
      case LONG:
        return JSON.getNodeFactory().numberNode((Long) value);
      case FLOAT:
        return JSON.getNodeFactory().numberNode(Float.floatToIntBits((Float) value));
      case DOUBLE:
        return JSON.getNodeFactory().numberNode(Double.doubleToLongBits((Double) value));
      case BYTES:
        ByteBuffer buffer = ((ByteBuffer) value).duplicate();
        byte[] bytes = new byte[buffer.remaining()];
        buffer.get(bytes);
        return JSON.getNodeFactory().textNode(HexFormat.of().formatHex(bytes));
      case FIXED:
        return JSON.getNodeFactory().textNode(HexFormat.of().formatHex(((GenericData.Fixed) value).bytes()));
      case ARRAY:
        ArrayNode items = JSON.createArrayNode();
        for (Object each : (Iterable<?>) value) {
          items.add(plain(schema.getElementType(), each));
        }
        return items;
      case MAP:
        Map<String, Object> sorted = new TreeMap<>();
        ((Map<?, ?>) value).forEach((key, each) -> sorted.put(key.toString(), each));
        ArrayNode pairs = JSON.createArrayNode();
        sorted.forEach((key, each) -> pairs.addArray().add(key).add(plain(schema.getValueType(), each)));
        return pairs;
      case RECORD:
        ArrayNode fields = JSON.createArrayNode();
        for (Schema.Field each : schema.getFields()) {
          fields.add(plain(each.schema(), ((GenericRecord) value).get(each.pos())));
        }
        return fields;
      default:
        return JSON.getNodeFactory().textNode(value.toString());
    }
  }
}
